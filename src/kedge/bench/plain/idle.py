"""What looking at plain requests costs: stock vLLM against vLLM with the plug-in where there is nothing to gain.

Every prompt is new, so nothing can be reused. Both engines stay up and take turns, batch by batch.
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

from kedge.bench.vllm.lane import BLOCK, KvRoom, VllmLane
from kedge.bench.vllm.measure import save_model
from kedge.bench.workflow.figures import random_tokens

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
    batches: int = 16
    """Batches of each engine, after one that is not counted. Short ones in turn: what else the machine does then falls
    on both alike."""
    seed: int = 0


QUICK_IDLE = IdleSettings(prompt=128, output=8, clients=4, calls=2, batches=3)


@dataclass(frozen=True)
class IdleResult:
    """Seconds of each batch, in pairs."""

    stock: tuple[float, ...]
    kedge: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """Throughput with the plug-in over stock's in each pair."""
        return [one / other for one, other in zip(self.stock, self.kedge, strict=True)]

    @property
    def share(self) -> float:
        """Throughput with the plug-in over stock's: the median of all pairs."""
        return median(self.ratios)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The middle half of all pairs."""
        lower, _, upper = quantiles(self.ratios, n=4, method="inclusive")
        return lower, upper

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        quartiles = [round(one, 4) for one in self.quartiles]
        return {"idle_share": round(self.share, 4), "idle_quartiles": quartiles, "idle_pairs": len(self.ratios)}


def measure_idle(settings: IdleSettings, progress: Progress) -> IdleResult:
    """Run all batches on both engines."""
    with tempfile.TemporaryDirectory() as folder:
        vocab = save_model(settings.model_size, Path(folder))
        return asyncio.run(_measure(settings, Path(folder), vocab, progress))


async def _measure(settings: IdleSettings, model: Path, vocab: int, progress: Progress) -> IdleResult:
    longest = settings.prompt + settings.output
    room = KvRoom(2 * settings.clients * (longest + BLOCK), longest + BLOCK)
    progress("idle: starting both engines")
    seconds: tuple[list[float], list[float]] = [], []
    with VllmLane(model, room, None) as stock, VllmLane(model, room, {}) as kedge:
        for number in range(settings.batches + 1):
            progress(f"idle: batch {number} of {settings.batches}")
            pairs = list(zip((stock, kedge), seconds, strict=True))
            for lane, found in pairs if number % 2 else reversed(pairs):
                found.append(await _batch(lane, settings, vocab, number))
    return IdleResult(tuple(seconds[0][1:]), tuple(seconds[1][1:]))


async def _batch(lane: VllmLane, settings: IdleSettings, vocab: int, number: int) -> float:
    """Return the seconds that all clients take for their calls."""

    async def client(at: int) -> None:
        for call in range(settings.calls):
            await lane.ask(random_tokens(settings.prompt, vocab, settings.seed, number, at, call), settings.output)

    began = time.perf_counter()
    await asyncio.gather(*map(client, range(settings.clients)))
    return time.perf_counter() - began
