"""A long run of new questions, to see whether anything grows with the number of past messages."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kedge.bench.shapes import random_engine
from kedge.bench.ttft.measure import TtftSettings, ask, workload_of
from kedge.engine.local.engine import LocalEngine
from kedge.guard import GuardMode
from kedge.settings import AnchorSettings, EngineSettings, GuardSettings, PlannerSettings
from kedge.types import Namespace, RunId, RunKey, TenantId, Tokens
from kedge.workloads.copy_machine import CopyMachine


@dataclass(frozen=True)
class SoakSettings:
    """The size of a soak. Every question is new and random, so hardly any is shareable and all are learned from."""

    questions: int = 2000
    capacity: int = 5
    every: int = 200
    """Questions between two samples."""
    workload: TtftSettings = TtftSettings(model_size="tiny", question=24, prefix=16, output=12, agents=3)


QUICK = SoakSettings(questions=100, every=20)
"""A run of less than a minute."""


def soak(settings: SoakSettings, on_sample: Callable[[dict[str, Any]], None] = lambda _: None) -> list[dict[str, Any]]:
    """Run all questions. Returns what is stored and the process's peak memory at regular intervals."""
    config = EngineSettings(
        num_blocks=256,
        anchors=AnchorSettings(capacity=settings.capacity, max_base_bytes=1 << 20),
        planner=PlannerSettings(by_cost=False, move="never"),  # so that all pools fill
        guard=GuardSettings(mode=GuardMode.OFF),
    )
    samples = []
    with random_engine(settings.workload.model_size, config) as engine:
        workload = workload_of(settings.workload)
        for answered in range(1, settings.questions + 1):
            _ask_all(engine, workload, settings.workload, f"run-{answered}")
            if answered % settings.every == 0:
                engine.wait_idle()
                samples.append(_sample(engine, answered))
                on_sample(samples[-1])
    return samples


def _ask_all(engine: LocalEngine, workload: CopyMachine, settings: TtftSettings, run: str) -> None:
    question = workload.tokens(settings.question)
    answers: list[Tokens] = []
    for agent in range(settings.agents):
        answers.append(ask(engine, workload.request(run, agent, question, answers), settings.output).tokens)
    engine.end_run(RunKey(Namespace(TenantId("default")), "", RunId(run)))


def _sample(engine: LocalEngine, answered: int) -> dict[str, Any]:
    figures: Any = engine.inspect()
    return {
        "questions": answered,
        "anchors": figures["anchors"]["anchors"],
        "anchor_bytes": figures["anchors"]["nbytes"],
        "base_values": figures["base_kv"]["values"],
        "base_bytes": figures["base_kv"]["nbytes"],
        "cached_blocks": figures["cache"]["cached_blocks"],
        "leased_blocks": figures["cache"]["leased_blocks"],
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
