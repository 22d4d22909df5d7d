"""Requests that wait for KV from the host: who goes first, how long they wait, and that nothing gets stuck."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kedge.cache import Direction
from kedge.engine.local import build, host_loads
from kedge.engine.local.build import EngineParts
from kedge.engine.local.engine import LocalEngine
from kedge.kv.copy import PoolCopier
from kedge.settings import ThrottledTiers
from kedge.types import (
    AgentId,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    Segment,
    Source,
)
from kedge.workflow.forecast import AgentKey
from kedge.workflow.steps import NextRun
from tests.engine.local.conftest import engine_of
from tests.engine.local.test_engine import prompt
from tests.engine.local.tiering import (
    AMPLE,
    BLOCK,
    FIXED,
    ROOM,
    RUN,
    VARYING,
    ask,
    engine_with,
    expected,
    figures,
    model,
    put_on_host,
)


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
    while not figures(engine)["loading"]["waited"]:
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
        engine.query(EngineParts.check_integrity)
        again = engine.submit(ask(0, 2)).result(60)
        assert again.tokens == expected(ask(0, 2).tokens)
        assert again.receipt.exact == FIXED


def test_without_status_awareness_those_behind_a_load_wait_too(gate: threading.Event) -> None:
    with engine_with(host_blocks=AMPLE, num_blocks=60) as engine:
        engine.query(lambda parts: setattr(parts.loading, "lets_pass", False))
        put_on_host(engine, others=10)
        first, second = engine.submit(ask(0, 1)), engine.submit(ask(1, 2))
        wait_for_load(engine)
        seen = [figures(engine)["scheduler"] for _ in range(50)]
        assert {one["waiting"] for one in seen} == {2}, "the second does not wait for the load of the first"
        gate.set()
        done, behind = first.result(60), second.result(60)
        assert (done.tokens, behind.tokens) == (expected(ask(0, 1).tokens), expected(ask(1, 2).tokens))
        assert done.receipt.tokens(Source.HOST) == FIXED


def test_waiting_is_bounded(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> None:
    """Its load never comes."""
    monkeypatch.setattr(host_loads, "MAX_WAIT_S", 0.02)
    with engine_with(host_blocks=AMPLE, num_blocks=60) as engine:
        put_on_host(engine, others=10)
        stream = engine.submit(ask(0, 1))
        wait_for_load(engine)
        engine.submit(ask(1, 2)).result(60)
        done = stream.result(60)
        assert done.tokens == expected(ask(0, 1).tokens)
        assert done.receipt.computed == FIXED + VARYING
        gate.set()


def test_what_is_computed_faster_than_it_is_loaded_is_computed() -> None:
    with engine_with(host_blocks=AMPLE, throttle=0.05) as engine:
        sources = []
        for asked in range(2):
            put_on_host(engine)
            done = engine.submit(ask(0, asked)).result(60)
            sources.append((done.receipt.tokens(Source.HOST), done.receipt.computed))
            engine.submit(GenerateRequest((Segment(prompt(700 + asked, 100), "p0"),), SamplingParams(1))).result(60)
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
    tiers = ThrottledTiers(host_memory=f"{AMPLE} blocks", throttle=1000)
    with engine_of(model(), kv_memory=f"{ROOM} blocks", block_size=BLOCK, tiers=tiers) as engine:
        engine.forecast({AgentKey(*RUN, AgentId("a0")): NextRun(9.0)})
        engine.submit(ask(0, 1)).result(60)
        assert figures(engine)["cache"]["offloading_blocks"] > 0
        closing = threading.Thread(target=engine.close)
        closing.start()
        closing.join(60)
        assert not closing.is_alive(), "a single block takes a quarter of an hour"
    assert copiers() == before


def copiers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "kedge-copier"}
