"""What an engine has learned does not grow with past messages, and weighs what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.ttft import CopyMachine
from kedge.bench.shapes import SHAPES, random_runner
from kedge.engine.local.engine import LocalEngine
from kedge.guard import GuardMode
from kedge.settings import AnchorSettings, EngineSettings, GuardSettings, PlannerSettings
from kedge.types import Namespace, RunId, RunKey, SamplingParams, TenantId, Tokens

CAPACITY, AGENTS = 3, 3


def asked(questions: int, every: int) -> Iterator[dict[str, Any]]:
    """Ask a team new and random questions, so that hardly any is shareable and all are learned from; yield what is
    stored at regular intervals.
    """
    config = EngineSettings(
        kv_memory="256 blocks",
        anchors=AnchorSettings(capacity=CAPACITY, max_base_bytes=1 << 20),
        planner=PlannerSettings(by_cost=False, move="never"),  # so that all pools fill
        guard=GuardSettings(mode=GuardMode.OFF),
    )
    machine = CopyMachine(AGENTS, 16, SHAPES["tiny"]["vocab_size"])
    with LocalEngine.from_runner(*random_runner("tiny", config.device), config) as engine:
        for answered in range(1, questions + 1):
            run, question, answers = f"run-{answered}", machine.tokens(24), list[Tokens]()
            for agent in range(AGENTS):
                request = machine.request(run, agent, question, answers)
                request = replace(request, sampling=SamplingParams(max_tokens=12, ignore_eos=True))
                answers.append(engine.submit(request).result().tokens)
            engine.end_run(RunKey(Namespace(TenantId("default")), "", RunId(run)))
            if answered % every == 0:
                engine.wait_idle()
                yield dict(engine.inspect())


def test_nothing_grows_with_the_number_of_questions() -> None:
    first, *later = asked(60, every=10)
    last = later[-1]
    # An anchor that only some of its readers were learned from holds less, so that bytes may shrink.
    assert all(0 < look["anchors"]["nbytes"] <= 1.02 * first["anchors"]["nbytes"] for look in later)
    assert last["base_kv"]["nbytes"] <= 1 << 20
    assert last["cache"]["leased_blocks"] == 0
    assert last["anchors"]["anchors"] == 3 * CAPACITY
