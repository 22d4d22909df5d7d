"""The host tier and forecasts inside the engine, and requests that wait for KV from the host: not one token changes."""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from transformers import PreTrainedModel

from kedge.cache import Copied, Direction
from kedge.engine.local import build, requests
from kedge.engine.local.build import EngineParts
from kedge.engine.local.engine import LocalEngine
from kedge.engine.local.model.loading import checked_runner
from kedge.errors import ConfigError
from kedge.kv.copy import PoolCopier
from kedge.policies.prefetch import PREFETCH_WINDOW
from kedge.settings import EngineSettings, ThrottledTiers
from kedge.types import (
    AgentKey,
    Completion,
    FinishReason,
    GenerateRequest,
    Namespace,
    ReuseMode,
    RunKey,
    SampleId,
    SamplingParams,
    Segment,
    Source,
    Tokens,
)
from kedge.workflow.forecast import ForecastBoard, RunProgress
from kedge.workflow.step_graph import Node, StepGraph
from kedge.workflow.steps import NextRun
from tests.engine.local.conftest import at_rest, engine_of, served, tiny_model, tiny_tokenizer
from tests.engine.local.test_engine import greedy, prompt

AGENTS, ROUNDS, FIXED, VARYING, OUT = 5, 3, 48, 8, 6
BLOCK = 8
ROOM = 3 * (FIXED + VARYING + 8) // BLOCK
"""Blocks of the device: three agents of five."""
AMPLE = 200
RUN = RunKey(Namespace("default"), "client", "run")
FIRST = Node("a0", loops=[f"a{AGENTS - 1}"])
GRAPH = StepGraph("cycle", (FIRST, *(Node(f"a{i}", after=[f"a{i - 1}"]) for i in range(1, AGENTS))))


@cache
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.mark.parametrize(
    ("settings", "key"),
    [({"kv_memory": "1EiB"}, "engine.kv_memory"), ({"tiers": {"host_memory": 2**62}}, "engine.tiers.host_memory")],
)
def test_memory_that_is_not_there_is_named(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}=.*: cannot be allocated"):
        EngineParts(checked_runner(model()), EngineSettings(**settings))


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
    return GenerateRequest(segments, params, ReuseMode.EXACT, client="client", run=RUN.run_id, agent=f"a{agent}")


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
    at_rest(engine)
    assert not engine._core.parts.cache._demands._waiting, "nobody waits any more, but the cache believes it"


def serve_cycle(engine: LocalEngine, rounds: int = ROUNDS, *, settled: bool = False) -> list[Completion]:
    """The agents one after the other, round after round, with the forecast that `run` would give; checks all tokens.
    Each call waits for the copies before it, if `settled`.
    """
    progress, done = RunProgress(GRAPH, RUN, ForecastBoard()), []
    engine.forecast(progress.begin(0.0))
    for asked in range(rounds * AGENTS):
        agent = asked % AGENTS
        request = ask(agent, asked)
        stream = engine.submit(request)
        engine.forecast(progress.started(request.agent, float(asked)))
        done.append(stream.result(60))
        engine.forecast(progress.finished(request.agent, asked + 0.5))
        if settled:
            engine.wait_idle(60)
        assert done[-1].tokens == expected(request.tokens)
        assert done[-1].receipt.prompt_tokens == request.prompt_tokens
    return done


def put_on_host(engine: LocalEngine, agent: int = 0, others: int = 4) -> None:
    """Leaves the fixed prompt of `agent` on the host only."""
    key = AgentKey(*RUN, f"a{agent}")
    engine.forecast({key: NextRun(1e6)})  # later than any other prompt is expected to return
    engine.submit(ask(agent, 900)).result(60)
    settle(engine)
    for n in range(others):
        served(engine, GenerateRequest((Segment(prompt(800 + n, FIXED + VARYING), "p0"),), SamplingParams(1)))
    status = engine.query(lambda parts: parts.cache.status(RUN.namespace, fixed(agent)))
    assert (status.device_tokens, status.host_tokens) == (0, FIXED)


# output and receipts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_blocks", [0, 2, AMPLE])
@pytest.mark.parametrize("policy", ["steps", "lru"])
@pytest.mark.parametrize("prefetch_window", [-1.0, 2.0])
def test_output_is_that_of_transformers(policy: str, host_blocks: int, prefetch_window: float) -> None:
    with engine_with(policy=policy, host_blocks=host_blocks, prefetch_window=prefetch_window) as engine:
        serve_cycle(engine)
        stats = engine.inspect()["cache"]
    assert (stats["blocks_offloaded"] > 0) == (host_blocks == AMPLE)
    assert (stats["blocks_loaded"] > 0) == (host_blocks == AMPLE)


def test_a_cycle_is_prefetched_ahead_of_its_agents() -> None:
    with engine_with(host_blocks=AMPLE) as engine:
        served = serve_cycle(engine, settled=True)  # so that no prefetch is late
        stats = engine.inspect()
    assert [done.receipt.exact for done in served] == [0] * AGENTS + [FIXED] * (len(served) - AGENTS)
    assert stats["cache"]["prefetched_hit_tokens"] > 4 * FIXED
    assert stats["cache"]["transfers"]["prefetch"]["completed"] > 4
    assert (stats["cache"]["host_hit_tokens"], stats["loading"]["waited"]) == (0, 0)


def test_what_was_waited_for_is_host_in_the_receipt_and_load_in_its_parts() -> None:
    with engine_with(policy="lru", host_blocks=AMPLE, throttle=2e-3, prefetch_window=-1) as engine:
        served = serve_cycle(engine, rounds=2)
        done, stats = served[-1], engine.inspect()
    host = [span for span in done.receipt.spans if span.source is Source.HOST]
    assert [(span.start, span.stop) for span in host] == [(0, FIXED)]
    assert done.receipt.exact == done.receipt.tokens(Source.HOST) == FIXED
    assert done.receipt.parts_ms["load"] > 0
    assert sum(done.receipt.parts_ms.values()) == pytest.approx(done.ttft_ms)
    assert all(ms >= 0 for ms in done.receipt.parts_ms.values())
    assert stats["cache"]["host_hit_tokens"] == stats["loading"]["waited"] * FIXED
    loads = [one.receipt.parts_ms.get("load", 0.0) for one in served]
    assert 1e3 * stats["loading"]["stall_s"] == pytest.approx(sum(loads))


# faults -------------------------------------------------------------------------------------------------------------


class Failing(PoolCopier):
    """Half of its copies fail, and leave dirt where they should have written."""

    def fails(self, copy: Any) -> bool:
        return not copy.copy_id % 2

    def _copy(self, order: Any, piece: slice) -> tuple[int, ...]:
        if not self.fails(order.copy):
            return super()._copy(order, piece)
        for pool in (pools[order.copy.direction is Direction.LOAD] for pools in self._pools):
            for block in order.copy.targets:
                pool[:, block * BLOCK : (block + 1) * BLOCK] = float("nan")
        raise OSError("the host has gone")


class NeverLoading(Failing):
    def fails(self, copy: Any) -> bool:
        return copy.direction is Direction.LOAD


class Reordering(PoolCopier):
    """Reports copies in another order than they ended in, and some of them late."""

    _rng = random.Random(0)
    _kept: tuple[Copied, ...] = ()

    def drain(self) -> list[Copied]:
        ended = [*self._kept, *super().drain()]
        self._rng.shuffle(ended)
        late = self._rng.randrange(2) if len(ended) > 1 else 0
        self._kept = tuple(ended[:late])
        return ended[late:]


@pytest.mark.parametrize("copier", [Failing, NeverLoading, Reordering])
@pytest.mark.parametrize("tiers", [{}, {"policy": "lru", "prefetch_window": -1}], ids=["full", "reactive"])
@pytest.mark.parametrize("throttle", [0.0, 1e-3])
def test_faulty_copiers_change_no_token(
    copier: type[PoolCopier], tiers: dict[str, object], throttle: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "PoolCopier", copier)
    with engine_with(host_blocks=AMPLE, throttle=throttle, **tiers) as engine:
        serve_cycle(engine)
        failed = engine.inspect()["cache"]["failed_copies"]
    assert (failed > 0) == (copier is not Reordering)


# sizes and hints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("agent", "marker", "backed_up"),
    [("a0", None, FIXED), ("a0", -1, FIXED), ("a0", 10_000, FIXED), ("a0", 17, 16), ("", 17, 0)],
)
def test_what_the_request_says_is_fixed_is_what_is_backed_up(agent: str, marker: int | None, backed_up: int) -> None:
    """Requests without an agent have no fixed prompt."""
    with engine_with(host_blocks=AMPLE, policy="steps") as engine:
        engine.forecast({AgentKey(*RUN, agent): NextRun(1.0)})
        served(engine, replace(ask(0, 1), agent=agent, fixed=marker))
        assert engine.inspect()["cache"]["host_cached_blocks"] * BLOCK == backed_up


def test_prompts_that_are_cached_already_are_fetched_when_a_run_begins() -> None:
    with engine_with(host_blocks=AMPLE) as engine:
        put_on_host(engine)
        key = AgentKey(Namespace("default"), "client", "next run", "a0")
        engine.forecast({AgentKey(*RUN, "a0"): None})
        engine.forecast({key: NextRun(0.0)}, {key: fixed(0)})
        engine.wait_idle(60)
        assert engine.query(lambda parts: parts.cache.status(RUN.namespace, fixed(0)).device_tokens) == FIXED


def test_the_size_of_the_host_tier() -> None:
    with engine_with(host_memory="1MiB") as engine:
        stats = engine.inspect()["cache"]
        assert stats["host_free_blocks"] == (1 << 20) // (engine.runner.spec.bytes_per_token * BLOCK)


def test_a_policy_of_ones_own() -> None:
    seen = []

    def newest_first(node: Any) -> tuple[float, ...]:
        seen.append(node)
        return (-node.last_access,)

    config = EngineSettings(kv_memory=f"{ROOM} blocks", block_size=BLOCK, device="cpu")
    with LocalEngine.from_runner(checked_runner(model()), tiny_tokenizer(), config, newest_first) as engine:
        for n in (0, 1, 2, 3, 0):
            done = engine.submit(ask(n, n)).result(60)
        assert seen and done.receipt.exact == FIXED + VARYING - 1


class Gate(PoolCopier):
    """Lets no load pass until it is opened."""

    opened = threading.Event()

    def _copy(self, order: Any, piece: slice) -> tuple[int, ...]:
        if order.copy.direction is Direction.LOAD:
            self.opened.wait(60)
        return super()._copy(order, piece)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Every engine's loads wait for it."""
    monkeypatch.setattr(Gate, "opened", threading.Event())
    monkeypatch.setattr(build, "PoolCopier", Gate)
    yield Gate.opened
    Gate.opened.set()


def wait_for_load(engine: LocalEngine) -> None:
    """Return once a request waits for its KV."""
    while not engine.inspect()["loading"]["waited"]:
        time.sleep(1e-3)


def test_others_decode_while_a_request_waits_for_its_load(gate: threading.Event) -> None:
    with engine_with(host_blocks=AMPLE, num_blocks=40) as engine:
        put_on_host(engine, others=8)
        running = engine.submit(ask(1, 1, max_tokens=150))
        deltas = iter(running)
        next(deltas)
        loading = engine.submit(ask(0, 2))
        late = engine.submit(ask(2, 3, max_tokens=1))
        assert late.result(60).tokens, "who comes later goes first"
        for _ in range(12):
            next(deltas)  # decoding goes on
        gate.set()
        done = loading.result(60)
        assert done.tokens == expected(ask(0, 2).tokens)
        assert done.receipt.tokens(Source.HOST) == FIXED
        engine.cancel(running.request_id)
        seen = running.result(60).tokens
        assert seen == expected(ask(1, 1).tokens, 150)[: len(seen)]


def test_a_request_that_is_cancelled_while_it_waits_leaves_nothing(gate: threading.Event) -> None:
    with engine_with(host_blocks=AMPLE) as engine:
        put_on_host(engine)
        stream = engine.submit(ask(0, 1))
        wait_for_load(engine)
        assert engine.cancel(stream.request_id)
        done = stream.result(60)
        assert (done.finish_reason, done.tokens, done.receipt.spans) == (FinishReason.CANCELLED, (), ())
        gate.set()
        engine.query(lambda parts: parts.cache.check_integrity())
        again = engine.submit(ask(0, 2)).result(60)
        assert again.tokens == expected(ask(0, 2).tokens)
        assert again.receipt.exact == FIXED


def test_waiting_is_bounded(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> None:
    """Its load never comes."""
    monkeypatch.setattr(requests, "MAX_WAIT_S", 0.02)
    with engine_with(host_blocks=AMPLE, num_blocks=60) as engine:
        put_on_host(engine, others=10)
        stream = engine.submit(ask(0, 1))
        wait_for_load(engine)
        engine.submit(ask(1, 2)).result(60)
        done = stream.result(60)
        assert done.tokens == expected(ask(0, 1).tokens)
        assert done.receipt.computed == FIXED + VARYING
        gate.set()


def test_a_load_without_room_waits_for_room_and_starves_nobody() -> None:
    with engine_with(host_blocks=AMPLE, num_blocks=20) as engine:
        put_on_host(engine)
        running = engine.submit(ask(1, 1, max_tokens=80))
        next(iter(running))
        stream = engine.submit(ask(0, 2))
        assert stream.result(60).tokens == expected(ask(0, 2).tokens)
        assert running.result(60).tokens == expected(ask(1, 1).tokens, 80)


def test_closing_while_copies_are_under_way() -> None:
    before = copiers()
    tiers = ThrottledTiers(host_memory=f"{AMPLE} blocks", throttle=1000)
    with engine_of(model(), kv_memory=f"{ROOM} blocks", block_size=BLOCK, tiers=tiers) as engine:
        engine.forecast({AgentKey(*RUN, "a0"): NextRun(9.0)})
        engine.submit(ask(0, 1)).result(60)
        assert engine.inspect()["cache"]["offloading_blocks"] > 0
        closing = threading.Thread(target=engine.close)
        closing.start()
        closing.join(60)
        assert not closing.is_alive(), "a single block takes a quarter of an hour"
    assert copiers() == before


def copiers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "kedge-copier"}
