"""What an engine has learned does not grow with past messages, and weighs what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.ttft import CopyMachine
from kedge.anchors.anchor import PlaceholderSite, PoolKey, SampleView
from kedge.anchors.store import AnchorStore
from kedge.bench.shapes import SHAPES, load_model, random_runner
from kedge.engine.local.engine import LocalEngine
from kedge.guard import GuardMode
from kedge.kv.segment import KVSegment
from kedge.kv.spec import KVSpec
from kedge.settings import AnchorSettings, EngineSettings, GuardSettings, PlannerSettings
from kedge.types import Namespace, RunId, RunKey, SamplingParams, TenantId, Tokens, WorkflowId

CAPACITY, AGENTS = 3, 3


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def filled(estimator: str, spec: KVSpec, samples: int, tokens: int = 64) -> int:
    """Return the bytes of a store whose one pool holds so many messages, which one reader has observed."""
    config = AnchorSettings(estimator=estimator, capacity=samples, min_anchors=2, max_bytes=64 << 30)
    store, random = AnchorStore(config), torch.Generator().manual_seed(0)
    pool = PoolKey(Namespace(TenantId("memory")), WorkflowId("memory"), "agent_1_current")

    def noise(count: int) -> KVSegment:
        shape = (spec.layers, count, spec.kv_heads, spec.head_dim)
        return KVSegment(*(torch.randn(shape, generator=random, dtype=torch.float32).to(spec.dtype) for _ in range(2)))

    for number in range(samples):
        sample = SampleView(pool, tuple(range(number, number + tokens)), noise(tokens), number)
        store.observe(PlaceholderSite("agent 0", 1), sample, noise(tokens), noise(32), noise(32))
    return store.nbytes()


def test_anchors_weigh_what_they_hold() -> None:
    spec = load_model(None, EngineSettings(device="cpu"))[0].spec
    for name in ("interpolate", "token"):
        few, many = (filled(name, spec, samples) for samples in (5, 20))
        assert many > 3 * few
        paper = 20 * (64 + 64 + 32) * spec.bytes_per_token  # base KV once, and all offsets of the reader
        assert many < paper
