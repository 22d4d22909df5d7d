"""The gain from assembling prompts before their requests arrive: TTFT of every agent but the first, by hint.

The workload is that of `kedge.bench.ttft.measure`. The agents run in three ways, each on questions of its own: without
any hint; with the hint that the next agent is going to read the answer, whose request follows at once; and with the
same hint and a request that follows when the work ahead is done. The lower bound of a TTFT is the pass over one token:
the mean time of a decoded token behind the same prompt.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

from kedge.bench.shapes import random_engine
from kedge.bench.ttft.measure import TtftSettings, engine_config, fill, of_length, workload_of
from kedge.engine.local.engine import LocalEngine
from kedge.types import Completion, Tokens
from kedge.workloads.copy_machine import CopyMachine

WAYS: Final = ("no_hint", "at_once", "ahead")


@dataclass
class PreassemblyTimes:
    """One agent's times in milliseconds, one entry per repeat."""

    agent: int
    prompt_tokens: int = 0
    ttft: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    step: list[float] = field(default_factory=list)
    """Times of one decoded token behind the prepared prompt, mean over its answer."""
    preassembled: int = 0
    """Prepared tokens when the request followed the work ahead."""

    @property
    def ratios(self) -> list[float]:
        """TTFT of the prepared prompt over its own decode step, by repeat."""
        return [ttft / step for ttft, step in zip(self.ttft["ahead"], self.step, strict=True)]

    def note(self, way: str, done: Completion) -> None:
        """Record a completion of one of `WAYS`."""
        self.ttft[way].append(done.ttft_ms)
        if way == "ahead":
            self.step.append((done.total_ms - done.ttft_ms) / (len(done.tokens) - 1))
            self.preassembled = done.receipt.preassembled

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        medians = {f"{way}_ms": round(statistics.median(times), 3) for way, times in self.ttft.items()}
        return {
            "agent": self.agent,
            "prompt_tokens": self.prompt_tokens,
            "preassembled": self.preassembled,
            **medians,
            "step_ms": round(statistics.median(self.step), 3),
            "steps": round(statistics.median(self.ratios), 3),
            "all_steps": [round(ratio, 3) for ratio in self.ratios],
        }


def measure(settings: TtftSettings, progress: Callable[[str], None] = lambda _: None) -> list[PreassemblyTimes]:
    """Fill the pools, then run all agents in every way, `repeats` times; return the agents from the second on."""
    workload = workload_of(settings)
    times = [PreassemblyTimes(agent) for agent in range(1, settings.agents)]
    runs = (f"run-{i}" for i in count())
    with random_engine(settings.model_size, engine_config(settings)) as engine:
        for i in range(settings.samples):
            progress(f"filling the pools: sample {i + 1} of {settings.samples}")
            fill(engine, workload, settings, next(runs), extra=i)
        for i in range(settings.repeats):
            for way in WAYS:
                progress(f"measuring: {way}, {i + 1} of {settings.repeats}")
                _measure_once(engine, workload, settings, next(runs), way, times)
    return times


def _measure_once(
    engine: LocalEngine,
    workload: CopyMachine,
    settings: TtftSettings,
    run: str,
    way: str,
    times: list[PreassemblyTimes],
) -> None:
    """Send one question through all agents, each answering in full."""
    question = workload.tokens(settings.question)
    answers: list[Tokens] = []
    for agent in range(settings.agents):
        request = workload.request(run, agent, question, answers)
        if way == "ahead":
            engine.wait_idle()
        stream = engine.submit(of_length(request, settings.output))
        if way != "no_hint" and agent + 1 < settings.agents:
            engine.prepare(workload.request(run, agent + 1, question, [*answers, ()]))
        done = stream.result()
        answers.append(done.tokens)
        if agent:
            times[agent - 1].prompt_tokens = request.prompt_tokens
            times[agent - 1].note(way, done)
    engine.wait_idle()
