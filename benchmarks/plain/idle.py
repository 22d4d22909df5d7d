"""What looking at plain requests costs: stock vLLM against vLLM with the plug-in where there is nothing to gain.

Every prompt is new, so nothing can be reused. Both engines take turns, batch by batch, and are started anew several
times, in either order: two processes with the same engine differ by up to 7 % in the speed of their passes, for as long
as they live.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from kedge.bench.flows import random_tokens
from kedge.bench.vllm.lane import BLOCK, KvRoom, VllmLane
from kedge.bench.vllm.measure import save_model

Progress = Callable[[str], None]


@dataclass(frozen=True)
class IdleSettings:
    """The batches of one-off requests."""

    model_size: str = "32m"
    prompt: int = 512
    """Tokens of a prompt"""
    output: int = 32
    """Tokens of an answer"""
    clients: int = 16
    calls: int = 2
    """Calls of each client in one batch"""
    batches: int = 4
    """Batches of each engine after a start and one that is not counted. Short ones in turn: what else the machine does
    then falls on both alike."""
    starts: int = 6
    """Times that both engines are started"""
    seed: int = 0


QUICK_IDLE = IdleSettings(prompt=128, output=8, clients=4, calls=2, batches=3, starts=2)


Seconds = tuple[list[float], list[float]]
"""Of each batch on stock vLLM, and of the same one with the plug-in"""


@dataclass(frozen=True)
class IdleResult:
    """Throughput with the plug-in over stock's, in each pair of batches of each start."""

    starts: tuple[tuple[float, ...], ...]

    @property
    def medians(self) -> list[float]:
        """The median pair of each start."""
        return [median(pairs) for pairs in self.starts]

    @property
    def share(self) -> float:
        """The median over the starts."""
        return median(self.medians)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The middle half of the starts."""
        lower, _, upper = quantiles(self.medians, n=4, method="inclusive")
        return lower, upper

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        quartiles = [round(one, 4) for one in self.quartiles]
        return {"idle_share": round(self.share, 4), "idle_quartiles": quartiles, "idle_starts": len(self.starts)}


def measure_idle(settings: IdleSettings, progress: Progress) -> IdleResult:
    """Run all batches on both engines."""
    with tempfile.TemporaryDirectory() as folder:
        vocab = save_model(settings.model_size, Path(folder))
        starts = []
        for start in range(settings.starts):
            progress(f"idle: start {start + 1} of {settings.starts}")
            stock, kedge = asyncio.run(_measure(settings, Path(folder), vocab, start))
            starts.append(tuple(one / other for one, other in zip(stock, kedge, strict=True)))
    return IdleResult(tuple(starts))


async def _measure(settings: IdleSettings, model: Path, vocab: int, start: int) -> Seconds:
    """Start both engines, stock's first at every other start. Returns the seconds of all batches but the first."""
    longest = settings.prompt + settings.output
    room = KvRoom(2 * settings.clients * (longest + BLOCK), longest + BLOCK)
    plugins: list[dict[str, Any] | None] = [None, {}] if start % 2 == 0 else [{}, None]
    with VllmLane(model, room, plugins[0]) as one, VllmLane(model, room, plugins[1]) as other:
        stock, kedge = sorted((one, other), key=lambda lane: lane.plugged)
        seconds: Seconds = ([], [])
        for number in range(settings.batches + 1):
            pairs = list(zip((stock, kedge), seconds, strict=True))
            for lane, found in pairs if number % 2 else reversed(pairs):
                found.append(await _batch(lane, settings, vocab, start, number))
    return seconds[0][1:], seconds[1][1:]


async def _batch(lane: VllmLane, settings: IdleSettings, vocab: int, *number: int) -> float:
    """Return the seconds that all clients take for their calls."""

    async def client(at: int) -> None:
        for call in range(settings.calls):
            await lane.ask(random_tokens(settings.prompt, vocab, settings.seed, *number, at, call), settings.output)

    began = time.perf_counter()
    await asyncio.gather(*map(client, range(settings.clients)))
    return time.perf_counter() - began
