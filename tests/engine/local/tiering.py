"""Engines with little room on the device and a host tier behind it, and agents that call them in a circle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from transformers import PreTrainedModel

from kedge.engine.local.build import EngineParts
from kedge.engine.local.engine import LocalEngine
from kedge.policies.prefetch import PREFETCH_WINDOW
from kedge.settings import ThrottledTiers
from kedge.types import (
    AgentId,
    ClientId,
    Completion,
    GenerateRequest,
    Namespace,
    ReuseMode,
    RunId,
    SampleId,
    SamplingParams,
    Segment,
    TenantId,
    Tokens,
)
from kedge.workflow.forecast import AgentKey, ForecastBoard, RunKey, RunProgress
from kedge.workflow.step_graph import Node, StepGraph
from kedge.workflow.steps import NextRun
from tests.engine.local.conftest import engine_of, tiny_model
from tests.engine.local.test_engine import greedy, prompt

AGENTS, ROUNDS, FIXED, VARYING, OUT = 5, 3, 48, 8, 6
BLOCK = 8
ROOM = 3 * (FIXED + VARYING + 8) // BLOCK
"""Blocks of the device: three agents of five."""
AMPLE = 200
RUN = RunKey(Namespace(TenantId("default")), "client", RunId("run"))
FIRST = Node("a0", loops=[f"a{AGENTS - 1}"])
GRAPH = StepGraph("cycle", (FIRST, *(Node(f"a{i}", after=[f"a{i - 1}"]) for i in range(1, AGENTS))))


@cache
def model() -> PreTrainedModel:
    return tiny_model("llama")


@cache
def oracle() -> PreTrainedModel:
    """The same weights once more: the engine's own model may be running while it is asked."""
    return tiny_model("llama")


@cache
def expected(tokens: Tokens, count: int = OUT) -> Tokens:
    return greedy(oracle(), tokens, count)


def fixed(agent: int) -> Tokens:
    return own(agent, prompt(1000 + agent, FIXED))


def own(number: int, tokens: Tokens) -> Tokens:
    """The tokens with a first one that those of other numbers do not have: no part of a block is theirs, too."""
    return (number % 256, *tokens[1:])


def ask(agent: int, asked: int, *, size: int = VARYING, **sampling: object) -> GenerateRequest:
    """Call number `asked` of an agent: its fixed prompt and something new."""
    params = SamplingParams(**{"max_tokens": OUT, "ignore_eos": True, **sampling})
    new = Segment(own(asked, prompt(asked, size)), "x", SampleId.parse(f"x@{asked}"))
    segments = (Segment(fixed(agent), "p0"), new)
    return GenerateRequest(
        segments, params, ReuseMode.EXACT, client=ClientId("client"), run=RUN.run_id, agent=AgentId(f"a{agent}")
    )


@contextmanager
def engine_with(**tiers: object) -> Iterator[LocalEngine]:
    """An engine with little room; when it is left, its books are right."""
    blocks, window = tiers.pop("num_blocks", ROOM), tiers.pop("prefetch_window", PREFETCH_WINDOW)
    if "host_blocks" in tiers:
        tiers["host_memory"] = f"{tiers.pop('host_blocks')} blocks"
    with engine_of(model(), kv_memory=f"{blocks} blocks", block_size=BLOCK, tiers=ThrottledTiers(**tiers)) as engine:
        engine.query(lambda parts: setattr(parts.cache.prefetcher, "window", window))
        yield engine
        settle(engine)


def settle(engine: LocalEngine) -> None:
    engine.wait_idle(60)
    engine.query(EngineParts.check_integrity)
    assert figures(engine)["cache"]["leased_blocks"] == 0
    assert not engine._core.parts.cache._demands._waiting, "nobody waits any more, but the cache believes it"


def figures(engine: LocalEngine) -> Any:
    return engine.inspect()


def serve_cycle(engine: LocalEngine, rounds: int = ROUNDS) -> list[Completion]:
    """The agents one after the other, round after round, with the forecast that `run` would give; checks all tokens."""
    progress, done = RunProgress(GRAPH, RUN, ForecastBoard()), []
    engine.forecast(progress.begin(0.0))
    for asked in range(rounds * AGENTS):
        agent = asked % AGENTS
        request = ask(agent, asked)
        stream = engine.submit(request)
        engine.forecast(progress.started(request.agent, float(asked)))
        done.append(stream.result(60))
        engine.forecast(progress.finished(request.agent, asked + 0.5))
        assert done[-1].tokens == expected(request.tokens)
        assert done[-1].receipt.prompt_tokens == request.prompt_tokens
    return done


def put_on_host(engine: LocalEngine, agent: int = 0, others: int = 4) -> None:
    """Leaves the fixed prompt of `agent` on the host only."""
    key = AgentKey(*RUN, AgentId(f"a{agent}"))
    engine.forecast({key: NextRun(1e6)})  # later than any other prompt is expected to return
    engine.submit(ask(agent, 900)).result(60)
    settle(engine)
    for n in range(others):
        engine.submit(GenerateRequest((Segment(prompt(800 + n, FIXED + VARYING), "p0"),), SamplingParams(1))).result(60)
        engine.wait_idle(60)
    status = engine.query(lambda parts: parts.cache.status(RUN.namespace, fixed(agent)))
    assert (status.device_tokens, status.host_tokens) == (0, FIXED)
