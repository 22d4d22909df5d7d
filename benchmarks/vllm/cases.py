"""Further cases of `kedge bench vllm`: the workflows of KVFlow's figures 6 and 8, sessions, and a team.

Sessions: every client asks, waits for the answer, pauses, and asks again with all of its history, on stock vLLM, on
stock with its own CPU offloading, and with the plug-in; pauses are shortened recorded ones, and no hints are given.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from benchmarks import tables
from benchmarks.vllm.team import team_case
from benchmarks.workflow.measure import QUICK, CaseSizes, cases
from kedge.bench.flows import percentile, with_given
from kedge.bench.shapes import to_compare
from kedge.bench.vllm import BLOCK, Case, Figures, KvRoom, Progress, VllmBenchSettings, VllmCall, VllmLane, measure_flow
from kedge.engine.common.model_folder import model_path
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.integrations.vllm.plugin.settings import SCHEDULER
from kedge.types import Tokens
from kedge.workloads import real

STOCK, NATIVE, KEDGE, KEDGE_HOST = "stock", "stock_offloading", "kedge", "kedge_host"
LANES = (STOCK, NATIVE, KEDGE, KEDGE_HOST)
SPREAD = 1.65
"""Standard deviation of the logarithm of a pause"""


@dataclass(frozen=True)
class SessionLoad:
    """The sessions (tokens) and the time that they are measured for."""

    live: Sequence[int] = (4, 16)
    """Sessions at once: below the cliff, and past it"""
    head: int = 768
    added: int = 96
    output: int = 12
    turns: tuple[int, int] = (4, 12)
    """Fewest and most turns of a session"""
    pause_s: float = 0.3
    """Median pause"""
    longest_pause_s: float = 5.0
    room: int = 6
    """Sessions of mean length that the device holds"""
    host: int = 4
    """Size of the host tier in rooms of the device"""
    warm_s: float = 24.0
    """So long that even where each first turn has to be computed, one after the other, all have been"""
    measured_s: float = 40.0
    trials: int = 2
    """Runs of every engine, each with other sessions; engines take turns"""
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return self.head + self.turns[1] * (self.added + self.output)

    @property
    def kv(self) -> KvRoom:
        """The device's room."""
        mean = self.head + sum(self.turns) / 4 * (self.added + self.output)
        return KvRoom(int(self.room * mean), self.longest + BLOCK)


QUICK_LOAD = SessionLoad(warm_s=4.0, measured_s=12.0, trials=1)
"""Shorter measurements."""
Trials = Sequence[Sequence["VllmTurn"]]
"""The turns of each run"""


@dataclass(frozen=True)
class VllmTurn:
    """A turn and when its answer had come, in seconds since the start."""

    ended: float
    call: VllmCall


def sessions_figures(load: SessionLoad, turns: Mapping[int, Mapping[str, Trials | None]]) -> Figures:
    """Return all engines' figures by live sessions. None: vLLM cannot run that on this machine."""
    live = {
        str(count): {name: trials and medians(trials, load.measured_s) for name, trials in lanes.items()}
        for count, lanes in turns.items()
    }
    return {"settings": asdict(load), "room_tokens": load.kv.tokens, "live": live}


def medians(trials: Trials, seconds: float) -> dict[str, Any]:
    """Return the medians of all runs' figures, and the figures of each run."""
    each = [figures(turns, seconds) for turns in trials]
    return {**{name: round(statistics.median(one[name] for one in each), 4) for name in each[0]}, "trials": each}


def figures(turns: Sequence[VllmTurn], seconds: float) -> dict[str, Any]:
    """Return rates and times of the turns that ended within so many seconds."""
    firsts = [turn.call.ttft_s for turn in turns]
    prompt = sum(len(turn.call.prompt) for turn in turns)
    return {
        "turns": len(turns),
        "turns_per_min": round(60 * len(turns) / seconds, 1),
        "hit": round(sum(turn.call.cached for turn in turns) / prompt, 4),
        "ttft_p50_s": round(statistics.median(firsts), 4),
        "ttft_p99_s": percentile(firsts, 0.99, 4),
    }


Words = Callable[[random.Random, int], Tokens]
"""The next tokens of a session: so many"""


def random_words(vocab: int) -> Words:
    """Return tokens by chance, for random weights."""
    return lambda draw, count: tuple(draw.randrange(2, vocab) for _ in range(count))


def read_words(model: Path) -> Words:
    """Return passages of XQuAD in a model's tokens, from any place on and over and over."""
    encode = HFTokenizer.load(model).encode
    asked = real.load("reading")[1]
    text = encode("\n\n".join(dict.fromkeys(one.text.partition("\n\nQuestion: ")[0] for one in asked)), special=False)

    def words(draw: random.Random, count: int) -> Tokens:
        start = draw.randrange(len(text))
        return tuple(itertools.islice(itertools.cycle(text), start, start + count))

    return words


class SessionClient:
    """One session after the other, each turn after the answer to the one before. The same on every engine."""

    def __init__(self, load: SessionLoad, words: Words, number: int) -> None:
        self._load, self._words = load, words
        self._random = random.Random(f"{load.seed}:{number}")
        self._history = Tokens()

    def prompts(self) -> Iterator[Tokens]:
        """Yield the next prompt, for ever; call `took` with each answer. The first session begins part way."""
        draw, load = self._random, self._load
        skipped = draw.randrange(load.turns[1])
        while True:
            self._history = self._tokens(load.head + skipped * (load.added + load.output))
            for _ in range(max(1, draw.randint(*load.turns) - skipped)):
                self._history += self._tokens(load.added)
                yield self._history
            skipped = 0

    def took(self, answer: Tokens) -> float:
        """Take an answer. Returns the seconds of the pause that follows."""
        self._history += answer
        return min(self._load.pause_s * self._random.lognormvariate(0, SPREAD), self._load.longest_pause_s)

    def _tokens(self, count: int) -> Tokens:
        return self._words(self._random, count)


async def drive(lane: VllmLane, load: SessionLoad, live: int, words: Words) -> list[VllmTurn]:
    """Return the turns of `live` sessions that end in the measured time."""
    began = time.perf_counter()
    stop = load.warm_s + load.measured_s
    turns: list[VllmTurn] = []

    async def chat(client: SessionClient) -> None:
        for prompt in client.prompts():
            call = await lane.ask(prompt, load.output)
            turns.append(VllmTurn(time.perf_counter() - began, call))
            if turns[-1].ended >= stop:
                return
            await asyncio.sleep(client.took(call.tokens))

    await asyncio.gather(*(chat(SessionClient(load, words, number)) for number in range(live)))
    return [turn for turn in turns if load.warm_s <= turn.ended < stop]


async def measure_sessions(load: SessionLoad, model: Path, words: Words, progress: Progress) -> Figures:
    """Measure all engines one after the other, each in a process of its own, with each number of live sessions."""
    runs: dict[int, dict[str, list[Sequence[VllmTurn] | None]]] = {
        live: {name: [] for name in LANES} for live in load.live
    }
    for trial, live, name in itertools.product(range(load.trials), load.live, LANES):
        progress(f"sessions: {live} live, {name}, run {trial + 1} of {load.trials}")
        other = replace(load, seed=load.seed + trial)
        runs[live][name].append(await _lane(name, other, model, live, words))
    found = {live: {name: _all_or_none(trials) for name, trials in lanes.items()} for live, lanes in runs.items()}
    return sessions_figures(load, found)


def _all_or_none(trials: Sequence[Sequence[VllmTurn] | None]) -> Trials | None:
    done = [one for one in trials if one is not None]
    return done if len(done) == len(trials) else None


async def _lane(name: str, load: SessionLoad, model: Path, live: int, words: Words) -> Sequence[VllmTurn] | None:
    if name == NATIVE and not can_offload():
        return None
    plugin, arguments = lane_settings(name, load, model)
    with VllmLane(model, load.kv, plugin, **arguments) as lane:
        return await drive(lane, load, live, words)


def lane_settings(name: str, load: SessionLoad, model: Path) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return the plug-in's settings and the engine's arguments of a lane. Both host tiers have the same room."""
    host = load.host * load.kv.blocks
    if name == NATIVE:
        return None, {"kv_offloading_size": host * block_bytes(model, 2) / 2**30}
    if name == STOCK:
        return None, {}
    tiers = {"host_memory": f"{host} blocks"} if name == KEDGE_HOST else {}
    return {"reuse": "exact", "tiers": tiers}, {"scheduler_cls": SCHEDULER}


def block_bytes(model: Path, bytes_per_number: int) -> int:
    """Return the bytes of a block's keys and values, all layers together."""
    config = AutoConfig.from_pretrained(model)
    heads, head_dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim * BLOCK * bytes_per_number


def can_offload() -> bool:
    """Return whether vLLM's own CPU offloading runs here: it wants a GPU."""
    from vllm.platforms import current_platform

    return current_platform.is_cuda_alike() or current_platform.is_xpu()


FIGURES = {"flows": 6, "peer": 8}


def flow(name: str, settings: VllmBenchSettings, model: Path, vocab: int, progress: Progress) -> Figures:
    """Measure the main case of a figure of workflow-aware caching."""
    shape, encode = QUICK if settings.quick else CaseSizes(), HFTokenizer.load(model_path(None)).encode
    work = cases(FIGURES[name], shape, vocab, settings.seed, encode)[0]
    return asyncio.run(measure_flow(name, work, settings, model, progress))


def sessions(settings: VllmBenchSettings, model: Path, vocab: int, progress: Progress) -> Figures:
    """Measure growing sessions in a closed loop: random tokens on random weights, or text on a real model."""
    load = with_given(QUICK_LOAD if settings.quick else SessionLoad(), trials=settings.trials)
    if settings.model is None:
        return asyncio.run(measure_sessions(load, model, random_words(vocab), progress))
    folder = model_path(settings.model, to_compare().dtype)
    return asyncio.run(measure_sessions(load, folder, read_words(folder), progress))


CASES: Mapping[str, Case] = {
    **{name: partial(flow, name) for name in FIGURES},
    "sessions": sessions,
    "team": team_case,
}
TABLES = {"sessions": tables.vllm_sessions, "team": tables.vllm_team}
"""Case -> what is printed of its figures, which are no workflow's"""
