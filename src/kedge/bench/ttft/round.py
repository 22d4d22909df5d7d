"""The cost of several agents that read the same value in the same round, against that of one.

A writer answers with a new value, then `n` requests ask at once, and read it: of `n` agents with prefixes of their own,
or `n` calls of one agent. What translating takes is all that is done between their admission and the pass: planning,
with the match of the value with the anchors, and writing. The whole prefill is the time from the first request until
all have their first token, with the passes over what is computed. Weights and tokens are random, so thresholds are
open, as in `kedge.bench.ttft.measure`. By default values are moved without anchors, and nothing is matched. The
prefixes of all readers are equally long, so that they move the value to the same positions.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kedge.bench.shapes import SHAPES, random_engine
from kedge.bench.ttft.measure import MOVED, TtftSettings, ask, engine_config, of_length
from kedge.engine.local.build import EngineParts
from kedge.engine.local.engine import LocalEngine
from kedge.types import (
    AgentId,
    Completion,
    GenerateRequest,
    ReuseMode,
    RunId,
    SampleId,
    SamplingParams,
    Segment,
    Tokens,
    ValueKind,
    WorkflowId,
)

TAIL, ANSWER = 16, 8
"""Tokens of the template behind the value, and of the readers' answers"""
WRITER = SampleId(ValueKind.AGENT, "writer")


@dataclass(frozen=True)
class RoundSettings:
    """The readers of each kind of round, the tokens of value and prefixes, and the number of trials."""

    readers: tuple[int, ...] = (1, 2, 4)
    model_size: str = "32m"
    value: int = 512
    prefix: int = 128
    samples: int = 20
    """Samples that every reader has learned from before, where values are translated by anchors"""
    trials: int = 10
    estimator: str = MOVED
    device: str = "auto"
    seed: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of readers, with the one that all are compared with, ascending."""
        return tuple(sorted({1, *self.readers}))

    @property
    def lessons(self) -> int:
        """The values that every reader reads before: without anchors one, which leaves its prefix in the cache."""
        return 1 if self.estimator == MOVED else self.samples


QUICK = RoundSettings(readers=(1, 2), value=96, prefix=32, samples=4, trials=3)
"""A measurement of less than a minute."""


@dataclass
class RoundTimes:
    """Milliseconds of the rounds with so many readers, one entry per trial."""

    readers: int
    of: str = "agents"
    """Whose requests they are: of so many `agents`, or so many `calls` of one"""
    match: list[float] = field(default_factory=list)
    """Planning of all readers, with the match."""
    write: list[float] = field(default_factory=list)
    """Writing of all readers' translations."""
    prefill: list[float] = field(default_factory=list)
    """From the first request until all readers have their first token."""

    @property
    def translating(self) -> list[float]:
        """Planning and writing together."""
        return [match + write for match, write in zip(self.match, self.write, strict=True)]

    def note(self, done: Sequence[Completion], seconds: float) -> None:
        """Add a round of `seconds`."""
        parts = [one.receipt.parts_ms for one in done]
        self.match.append(sum(one["match"] for one in parts))
        self.write.append(sum(one["assemble"] for one in parts))
        self.prefill.append(seconds * 1e3)

    def as_json(self, one: RoundTimes) -> dict[str, Any]:
        """Return medians, all times, and the ratios to rounds with one reader, trial by trial."""
        return {
            "readers": self.readers,
            "of": self.of,
            "match_ms": round(statistics.median(self.match), 3),
            "write_ms": round(statistics.median(self.write), 3),
            "translating_ms": round(statistics.median(self.translating), 3),
            "prefill_ms": round(statistics.median(self.prefill), 3),
            "times_translating": _spread(self.translating, one.translating),
            "times_prefill": _spread(self.prefill, one.prefill),
            "all_match_ms": [round(ms, 3) for ms in self.match],
            "all_write_ms": [round(ms, 3) for ms in self.write],
            "all_prefill_ms": [round(ms, 3) for ms in self.prefill],
        }


def _spread(times: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Return the median and the quartiles of the ratios of two measurements of the same trials."""
    ratios = [a / b for a, b in zip(times, others, strict=True)]
    low, median, high = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {"median": round(median, 3), "q1": round(low, 3), "q3": round(high, 3)}


class RoundWorkload:
    """The requests of one writer and several readers, in random token ids from a vocabulary of `vocab`."""

    def __init__(self, readers: int, prefix: int, vocab: int, seed: int) -> None:
        self._rng, self._vocab = random.Random(seed), vocab
        self._fixed = [(self.tokens(prefix), self.tokens(TAIL)) for _ in range(readers)]
        self._lead_in, self._name = self.tokens(4), self.tokens(4)
        self._writers = self.tokens(8)

    def tokens(self, size: int) -> Tokens:
        """Return the next `size` random token ids."""
        return tuple(self._rng.randrange(2, self._vocab) for _ in range(size))

    def writer(self, run: str) -> GenerateRequest:
        """Return the request whose answer the run's readers read."""
        return GenerateRequest(
            (Segment(self._writers + self.tokens(8), "p0"),),
            reuse=ReuseMode.TRANSLATE,
            run=RunId(run),
            workflow=WorkflowId("round"),
            agent=AgentId("writer"),
            produces=WRITER,
        )

    def reader(self, run: str, number: int, value: Tokens) -> GenerateRequest:
        """Return the request of a reader of `value`."""
        before, after = self._fixed[number]
        read = Segment(value, "agent_writer_current", WRITER, self._lead_in, self._name)
        return GenerateRequest(
            (Segment(before, "p0"), read, Segment(after, "p1")),
            reuse=ReuseMode.TRANSLATE,
            run=RunId(run),
            workflow=WorkflowId("round"),
            agent=AgentId(f"reader-{number}"),
        )


def measure(settings: RoundSettings, progress: Callable[[str], None] = lambda _: None) -> list[RoundTimes]:
    """Let all readers learn, then run rounds of every size in turn, each with a new value."""
    most, vocab = settings.sizes[-1], SHAPES[settings.model_size]["vocab_size"]
    workload = RoundWorkload(most, settings.prefix, vocab, settings.seed)
    times = [RoundTimes(size, of) for size in settings.sizes for of in ("agents", "calls")[:size]]
    with random_engine(settings.model_size, engine_config(_as_ttft(settings, most))) as engine:
        engine.query(_touch)
        for i in range(settings.lessons):
            progress(f"learning: sample {i + 1} of {settings.lessons}")
            _teach(engine, workload, f"lesson-{i}", workload.tokens(settings.value + i), most)
        for trial in range(settings.trials + 1):  # the first one is not counted: it uses kernels and memory first
            progress(f"measuring: trial {trial} of {settings.trials}")
            for one in times[trial % len(times) :] + times[: trial % len(times)]:
                numbers = range(one.readers) if one.of == "agents" else [0] * one.readers
                done, seconds = _round(engine, workload, settings, f"trial-{trial}-{one.readers}-{one.of}", numbers)
                if trial:
                    one.note(done, seconds)
    return times


def _touch(parts: EngineParts) -> None:
    """Write to all slots: a page that is first used in a round takes longer than what is written to it."""
    parts.storage.keys.zero_()
    parts.storage.values.zero_()


def as_json(times: Sequence[RoundTimes]) -> list[dict[str, Any]]:
    """Return the figures of all sizes, the first of which is one reader."""
    return [one.as_json(times[0]) for one in times]


def _as_ttft(settings: RoundSettings, readers: int) -> TtftSettings:
    """Return the settings by which `engine_config` makes room for everything, and opens thresholds."""
    return TtftSettings(
        settings.model_size,
        question=settings.value,
        prefix=settings.prefix,
        output=settings.value,
        agents=readers + 1,
        samples=settings.samples,
        estimator=settings.estimator,
        device=settings.device,
    )


def _teach(engine: LocalEngine, workload: RoundWorkload, run: str, value: Tokens, readers: int) -> None:
    """Let all readers learn from a given value, one after the other."""
    for number in range(readers):
        ask(engine, workload.reader(run, number, value), 1)
        engine.wait_idle()


def _round(
    engine: LocalEngine, workload: RoundWorkload, settings: RoundSettings, run: str, readers: Sequence[int]
) -> tuple[list[Completion], float]:
    """Let a value be written and read. Returns the readers' answers, and the seconds until all had begun."""
    sampling = SamplingParams(max_tokens=settings.value, ignore_eos=True, temperature=1.0, seed=settings.seed)
    value = engine.submit(replace(workload.writer(run), sampling=sampling)).result().tokens
    engine.wait_idle()
    requests = [of_length(workload.reader(run, number, value), ANSWER) for number in readers]
    began, streams, at = time.perf_counter(), [], []
    for request in requests:
        at.append(time.perf_counter() - began)
        streams.append(engine.submit(request))
    done = [stream.result() for stream in streams]
    assert all(one.receipt.translated for one in done), "a reader was not translated"
    engine.end_run(requests[0].run_key)
    engine.wait_idle()
    return done, max(start + one.ttft_ms / 1e3 for start, one in zip(at, done, strict=True))
