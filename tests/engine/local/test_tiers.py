"""The host tier, forecasts and waiting for loads inside the engine: not one token changes, and nothing gets stuck."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kedge.cache import Copied, Direction
from kedge.engine.local import build
from kedge.engine.local.engine import LocalEngine
from kedge.errors import ConfigError, PromptTooLong
from kedge.kv.copy import TorchCopier
from kedge.settings import TierSettings
from kedge.types import (
    AgentId,
    ClientId,
    Completion,
    FinishReason,
    GenerateRequest,
    Namespace,
    ReuseMode,
    RunId,
    SampleId,
    SamplingParams,
    Segment,
    Source,
    TenantId,
    Tokens,
)
from kedge.workflow import AgentKey, ForecastBoard, NextRun, Node, RunKey, RunProgress, StepGraph
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
    return prompt(1000 + agent, FIXED)


def ask(agent: int, asked: int, *, size: int = VARYING, **sampling: object) -> GenerateRequest:
    """Call number `asked` of an agent: its fixed prompt and something new."""
    params = SamplingParams(**{"max_tokens": OUT, "ignore_eos": True, **sampling})
    segments = (Segment(fixed(agent), "p0"), Segment(prompt(asked, size), "x", SampleId.parse(f"x@{asked}")))
    return GenerateRequest(
        segments, params, ReuseMode.EXACT, client=ClientId("client"), run=RUN.run_id, agent=AgentId(f"a{agent}")
    )


@contextmanager
def engine_with(**tiers: object) -> Iterator[LocalEngine]:
    """An engine with little room; when it is left, its books are right."""
    blocks = tiers.pop("num_blocks", ROOM)
    with engine_of(model(), num_blocks=blocks, block_size=BLOCK, tiers=TierSettings(**tiers)) as engine:
        yield engine
        settle(engine)


def settle(engine: LocalEngine) -> None:
    engine.wait_idle(30)
    engine._mailbox.ask(engine._core.check_integrity)
    assert figures(engine)["cache"]["leased_blocks"] == 0
    assert not engine._core._cache._demands._waiting, "nobody waits any more, but the cache believes it"


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
        done.append(stream.result(30))
        engine.forecast(progress.finished(request.agent, asked + 0.5))
        assert done[-1].tokens == expected(request.tokens)
        assert done[-1].receipt.prompt_tokens == request.prompt_tokens
    return done


# output and receipts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_blocks", [0, 2, AMPLE])
@pytest.mark.parametrize("policy", ["steps", "lru"])
@pytest.mark.parametrize("prefetch_window", [-1.0, 2.0])
def test_output_is_that_of_transformers(policy: str, host_blocks: int, prefetch_window: float) -> None:
    with engine_with(policy=policy, host_blocks=host_blocks, prefetch_window=prefetch_window) as engine:
        serve_cycle(engine)
        stats = figures(engine)["cache"]
    assert (stats["blocks_offloaded"] > 0) == (host_blocks == AMPLE)
    assert (stats["blocks_loaded"] > 0) == (host_blocks == AMPLE)


def test_a_cycle_is_prefetched_ahead_of_its_agents() -> None:
    with engine_with(host_blocks=AMPLE) as engine:
        progress = RunProgress(GRAPH, RUN, ForecastBoard())
        engine.forecast(progress.begin(0.0))
        for asked in range(3 * AGENTS):
            request = ask(asked % AGENTS, asked)
            stream = engine.submit(request)
            engine.forecast(progress.started(request.agent, float(asked)))
            done = stream.result(30)
            engine.forecast(progress.finished(request.agent, asked + 0.5))
            engine.wait_idle(30)  # so that no prefetch is late
            assert done.receipt.exact == (FIXED if asked >= AGENTS else 0)
        stats = figures(engine)
    assert stats["cache"]["prefetched_hit_tokens"] > 4 * FIXED
    assert stats["cache"]["transfers"]["prefetch"]["completed"] > 4
    assert (stats["cache"]["host_hit_tokens"], stats["loading"]["waited"]) == (0, 0)


def test_without_hints_steps_is_lru_to_the_letter() -> None:
    receipts = []
    for policy in ("steps", "lru"):
        with engine_with(policy=policy, host_blocks=0) as engine:
            done = [engine.submit(ask(i, n)).result(30) for n, i in enumerate([0, 1, 2, 0, 3, 4, 1, 0, 2, 2])]
            receipts.append([one.receipt.spans for one in done])
    assert receipts[0] == receipts[1]


def test_what_was_waited_for_is_host_in_the_receipt_and_load_in_its_parts() -> None:
    with engine_with(policy="lru", host_blocks=AMPLE, throttle=2e-3, prefetch_window=-1) as engine:
        served = serve_cycle(engine, rounds=2)
        done, stats = served[-1], figures(engine)
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


class Failing(TorchCopier):
    """Half of its copies fail, and leave dirt where they should have written."""

    def _copy(self, order: Any, piece: slice) -> None:
        if order.copy.copy_id % 2:
            return super()._copy(order, piece)
        for pool in (pools[order.copy.direction is Direction.LOAD] for pools in self._pools):
            for block in order.copy.targets:
                pool[:, block * BLOCK : (block + 1) * BLOCK] = float("nan")
        raise OSError("the host has gone")


class AlwaysFailing(TorchCopier):
    """No load ever works."""

    def _copy(self, order: Any, piece: slice) -> None:
        if order.copy.direction is Direction.LOAD:
            raise OSError("no load works")
        super()._copy(order, piece)


class Reordering(TorchCopier):
    """Reports copies in another order than they ended in, and some of them late."""

    _rng = random.Random(0)
    _kept: tuple[Copied, ...] = ()

    def drain(self) -> list[Copied]:
        ended = [*self._kept, *super().drain()]
        self._rng.shuffle(ended)
        late = self._rng.randrange(2) if len(ended) > 1 else 0
        self._kept = tuple(ended[:late])
        return ended[late:]


@pytest.mark.parametrize("copier", [Failing, AlwaysFailing, Reordering])
@pytest.mark.parametrize("tiers", [{}, {"policy": "lru", "prefetch_window": -1}], ids=["full", "reactive"])
@pytest.mark.parametrize("throttle", [0.0, 1e-3])
def test_faulty_copiers_change_no_token(
    copier: type[TorchCopier], tiers: dict[str, object], throttle: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "TorchCopier", copier)
    with engine_with(host_blocks=AMPLE, throttle=throttle, **tiers) as engine:
        serve_cycle(engine)
        failed = figures(engine)["cache"]["failed_copies"]
    assert (failed > 0) == (copier is not Reordering)


@pytest.mark.parametrize("throttle", [0.0, 5e-4])
def test_many_at_once_under_pressure(throttle: float) -> None:
    rng = random.Random(3)
    with engine_with(host_blocks=40, throttle=throttle, backup_hits=0) as engine:
        progress = RunProgress(GRAPH, RUN, ForecastBoard())
        engine.forecast(progress.begin(0.0))
        requests = [ask(rng.randrange(AGENTS), n) for n in range(24)]
        streams = []
        for n, request in enumerate(requests):
            streams.append(engine.submit(request))
            engine.forecast(progress.started(request.agent, float(n)))
            engine._mailbox.ask(engine._core.check_integrity)
        for request, stream in zip(requests, streams, strict=True):
            assert stream.result(60).tokens == expected(request.tokens)


# waiting ------------------------------------------------------------------------------------------------------------


class Gate(TorchCopier):
    """Lets no load pass until it is opened."""

    opened = threading.Event()

    def _copy(self, order: Any, piece: slice) -> None:
        if order.copy.direction is Direction.LOAD:
            self.opened.wait(60)
        super()._copy(order, piece)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Every engine's loads wait for it."""
    monkeypatch.setattr(Gate, "opened", threading.Event())
    monkeypatch.setattr(build, "TorchCopier", Gate)
    yield Gate.opened
    Gate.opened.set()


def wait_for_load(engine: LocalEngine) -> None:
    """Return once a request waits for its KV."""
    while not figures(engine)["loading"]["waited"]:
        time.sleep(1e-3)


def put_on_host(engine: LocalEngine, agent: int = 0, others: int = 4) -> None:
    """Leaves the fixed prompt of `agent` on the host only."""
    key = AgentKey(*RUN, AgentId(f"a{agent}"))
    engine.forecast({key: NextRun(9.0)})
    engine.submit(ask(agent, 900)).result(30)
    settle(engine)
    for n in range(others):
        engine.submit(GenerateRequest((Segment(prompt(800 + n, FIXED + VARYING), "p0"),), SamplingParams(1))).result(30)
        engine.wait_idle(30)
    status = engine._mailbox.ask(lambda: engine._core._cache.status(RUN.namespace, fixed(agent)))
    assert (status.device_tokens, status.host_tokens) == (0, FIXED)


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
        done = loading.result(30)
        assert done.tokens == expected(ask(0, 2).tokens)
        assert done.receipt.tokens(Source.HOST) == FIXED
        engine.cancel(running.request_id)
        seen = running.result(60).tokens
        assert seen == expected(ask(1, 1).tokens, 150)[: len(seen)]
        assert figures(engine)["loading"]["skips"] == 1


def test_a_request_that_is_cancelled_while_it_waits_leaves_nothing(gate: threading.Event) -> None:
    with engine_with(host_blocks=AMPLE) as engine:
        put_on_host(engine)
        stream = engine.submit(ask(0, 1))
        wait_for_load(engine)
        assert engine.cancel(stream.request_id)
        done = stream.result(60)
        assert (done.finish_reason, done.tokens, done.receipt.spans) == (FinishReason.CANCELLED, (), ())
        gate.set()
        engine._mailbox.ask(engine._core.check_integrity)
        again = engine.submit(ask(0, 2)).result(30)
        assert again.tokens == expected(ask(0, 2).tokens)
        assert again.receipt.exact == FIXED


def test_without_status_awareness_those_behind_a_load_wait_too(gate: threading.Event) -> None:
    with engine_with(host_blocks=AMPLE, num_blocks=60, status_aware=False) as engine:
        put_on_host(engine, others=10)
        first, second = engine.submit(ask(0, 1)), engine.submit(ask(1, 2))
        wait_for_load(engine)
        seen = [figures(engine)["scheduler"] for _ in range(50)]
        assert {one["waiting"] for one in seen} == {2}, "the second does not wait for the load of the first"
        gate.set()
        done, behind = first.result(30), second.result(30)
        assert (done.tokens, behind.tokens) == (expected(ask(0, 1).tokens), expected(ask(1, 2).tokens))
        assert done.receipt.tokens(Source.HOST) == FIXED
        assert figures(engine)["loading"]["skips"] == 0


@pytest.mark.parametrize("limit", [{"max_wait": 0.02}, {"max_skips": 0}])
def test_waiting_is_bounded(limit: dict[str, object], gate: threading.Event) -> None:
    """Its load never comes."""
    with engine_with(host_blocks=AMPLE, num_blocks=60, **limit) as engine:
        put_on_host(engine, others=10)
        stream = engine.submit(ask(0, 1))
        wait_for_load(engine)
        engine.submit(ask(1, 2)).result(60)
        done = stream.result(30)
        assert done.tokens == expected(ask(0, 1).tokens)
        assert done.receipt.computed == FIXED + VARYING
        assert figures(engine)["loading"]["given_up"] == 1
        gate.set()


def test_what_is_computed_faster_than_it_is_loaded_is_computed() -> None:
    with engine_with(host_blocks=AMPLE, throttle=0.05) as engine:
        sources = []
        for asked in range(2):
            put_on_host(engine)
            done = engine.submit(ask(0, asked)).result(30)
            sources.append((done.receipt.tokens(Source.HOST), done.receipt.computed))
            engine.submit(GenerateRequest((Segment(prompt(700 + asked, 100), "p0"),), SamplingParams(1))).result(30)
        assert sources == [(FIXED, VARYING), (0, FIXED + VARYING)], "both costs are known only the second time"


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
    with engine_of(
        model(), num_blocks=ROOM, block_size=BLOCK, tiers=TierSettings(host_blocks=AMPLE, throttle=1000)
    ) as engine:
        engine.forecast({AgentKey(*RUN, AgentId("a0")): NextRun(9.0)})
        engine.submit(ask(0, 1)).result(30)
        assert figures(engine)["cache"]["offloading_blocks"] > 0
        closing = threading.Thread(target=engine.close)
        closing.start()
        closing.join(60)
        assert not closing.is_alive(), "a single block takes a quarter of an hour"
    assert copiers() == before


def copiers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "kedge-copier"}


# sizes and hints ----------------------------------------------------------------------------------------------------


def test_a_prompt_that_fills_the_device_comes_and_goes() -> None:
    blocks = 16
    whole = blocks * BLOCK
    long = [prompt(n, whole - OUT) for n in (1, 2)]
    with engine_with(host_blocks=AMPLE, num_blocks=blocks, backup_hits=0) as engine:
        for n in (0, 1, 0, 1):
            request = GenerateRequest((Segment(long[n], "p0"),), SamplingParams(OUT, ignore_eos=True))
            assert engine.submit(request).result(30).tokens == expected(long[n])
            settle(engine)
        assert figures(engine)["cache"]["host_hit_tokens"] > 0


def test_a_fixed_prompt_larger_than_the_device_is_refused_and_as_a_hint_ignored() -> None:
    blocks = 16
    huge = prompt(5, 2 * blocks * BLOCK)
    with engine_with(host_blocks=AMPLE, num_blocks=blocks) as engine:
        key = AgentKey(*RUN, AgentId("a0"))
        engine.forecast({key: NextRun(0.0)}, {key: huge})
        with pytest.raises(PromptTooLong):
            engine.submit(GenerateRequest((Segment(huge, "p0"),), agent=AgentId("a0")))
        assert engine.submit(ask(0, 1)).result(30).tokens == expected(ask(0, 1).tokens)
        assert figures(engine)["cache"]["ignored_labels"] > 0


def test_wrong_hints_change_no_token() -> None:
    rng = random.Random(1)
    keys = [AgentKey(*RUN, AgentId(f"a{i}")) for i in range(AGENTS + 2)]
    with engine_with(host_blocks=AMPLE) as engine:
        for asked in range(4 * AGENTS):
            steps = [None, NextRun(float(rng.randrange(5))), NextRun(float("inf"), 0.0)]
            wrong = {key: rng.choice(steps) for key in rng.sample(keys, 3)}
            engine.forecast(wrong, {keys[0]: fixed(1), keys[-1]: prompt(asked, 30), keys[1]: ()})
            request = ask(rng.randrange(AGENTS), asked)
            engine.forecast({}, {})
            assert engine.submit(request).result(30).tokens == expected(request.tokens)
            engine._mailbox.ask(engine._core.check_integrity)


def test_hints_to_a_closed_engine_are_no_error() -> None:
    engine = engine_of(model())
    engine.close()
    engine.forecast({AgentKey(*RUN, AgentId("a0")): NextRun(1.0)})


@pytest.mark.parametrize("marker", [None, -1, 10_000, 17])
def test_what_the_request_says_is_fixed_is_what_is_backed_up(marker: int | None) -> None:
    with engine_with(host_blocks=AMPLE) as engine:
        engine.forecast({AgentKey(*RUN, AgentId("a0")): NextRun(1.0)})
        request = ask(0, 1)
        engine.submit(
            GenerateRequest(
                request.segments, request.sampling, client=request.client, run=request.run, agent=request.agent,
                fixed=marker,
            )
        ).result(30)  # fmt: skip
        engine.wait_idle(30)
        assert figures(engine)["cache"]["host_cached_blocks"] * BLOCK == (16 if marker == 17 else FIXED)


def test_plain_requests_are_watched_for_what_they_have_in_common() -> None:
    with engine_with(host_blocks=AMPLE, backup_hits=None) as engine:
        engine.forecast({AgentKey(*RUN, AgentId("a0")): NextRun(1.0)})
        for asked in range(5):
            tokens = (*fixed(0), *prompt(asked, VARYING))
            request = GenerateRequest(
                (Segment(tokens, "p0"),), SamplingParams(1), client=ClientId("client"), run=RUN.run_id,
                agent=AgentId("a0"),
            )  # fmt: skip
            engine.submit(request).result(30)
            engine.wait_idle(30)
        assert figures(engine)["cache"]["host_cached_blocks"] * BLOCK == FIXED


def test_requests_without_an_agent_have_no_fixed_prompt() -> None:
    with engine_with(host_blocks=AMPLE) as engine:
        engine.forecast({AgentKey(Namespace(TenantId("default")), "", RunId(""), AgentId("")): NextRun(1.0)})
        engine.submit(GenerateRequest(ask(0, 1).segments, SamplingParams(1))).result(30)
        engine.wait_idle(30)
        assert figures(engine)["cache"]["host_cached_blocks"] == 0


def test_prompts_that_are_cached_already_are_fetched_when_a_run_begins() -> None:
    with engine_with(host_blocks=AMPLE) as engine:
        put_on_host(engine)
        key = AgentKey(Namespace(TenantId("default")), "client", RunId("next run"), AgentId("a0"))
        engine.forecast({AgentKey(*RUN, AgentId("a0")): None})
        engine.forecast({key: NextRun(0.0)}, {key: fixed(0)})
        engine.wait_idle(30)
        assert engine._mailbox.ask(lambda: engine._core._cache.match(RUN.namespace, fixed(0)).tokens_count) == FIXED


def test_the_size_of_the_host_tier() -> None:
    with engine_with(host_memory="1MiB") as engine:
        stats = figures(engine)["cache"]
        assert stats["host_free_blocks"] == (1 << 20) // (engine.kv_spec.bytes_per_token * BLOCK)
    with pytest.raises(ConfigError, match=r"engine\.tiers\.host_memory=5"):
        engine_of(model(), tiers=TierSettings(host_memory=5))


def test_a_policy_of_ones_own() -> None:
    seen = []

    def newest_first(node: Any) -> tuple[float, ...]:
        seen.append(node)
        return (-node.last_access,)

    with torch.inference_mode():
        engine = engine_of(model(), num_blocks=ROOM, block_size=BLOCK)
    engine.close()
    with LocalEngine.from_runner(engine._runner, engine.tokenizer, engine.config, newest_first) as engine:
        for n in (0, 1, 2, 3, 0):
            done = engine.submit(ask(n, n)).result(30)
        assert seen and done.receipt.exact == FIXED + VARYING - BLOCK
