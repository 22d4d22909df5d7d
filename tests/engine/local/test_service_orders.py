"""The order of service in the embedded engine: whose KV is cached goes on under overload, and nobody is left behind."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from random import Random

import pytest

from kedge.engine.local.scheduler import ServiceOrders
from kedge.engine.local.sequence import RequestSequence
from kedge.engine.local.sessions import SessionCaching
from kedge.types import GenerateRequest, Namespace, RequestId, ReuseMode, SamplingParams, Segment
from tests.engine.local.stepping import Stepped
from tests.engine.local.test_fairness import STRANGER
from tests.engine.local.test_translation import tokens

SMALL = {"kv_memory": "18 blocks", "max_running": 1}
"""Room for two contexts of `TURN` tokens and their answers, in blocks of 16"""
TURN = 128
_ids = count()


def turn(seed: int, size: int = TURN, tenant: str = "tenant", reuse: ReuseMode = ReuseMode.EXACT) -> GenerateRequest:
    """A turn of the session `seed`, whose prompts begin alike."""
    return GenerateRequest(
        (Segment(tokens(seed, 1024)[:size], "p0"),),
        SamplingParams(4, ignore_eos=True),
        reuse,
        RequestId(f"{seed}-{next(_ids)}"),
        *Namespace.parse(tenant),
    )


def waiting(engine: Stepped) -> list[str]:
    return [one.request.request_id.split("-")[0] for one in engine.core.scheduler.waiting]


def served(engine: Stepped, seed: int) -> None:
    """Serve a turn of a session to its end."""
    engine.submit(turn(seed))
    engine.rest()


def held_up(engine: Stepped) -> RequestSequence:
    """Let a call of one block run, behind which all others wait."""
    running = engine.submit(turn(99, 8))
    engine.step()
    assert running.admitted and not running.is_over
    return running


def test_under_overload_who_is_cached_goes_before_who_was_evicted() -> None:
    engine = Stepped(**SMALL)
    for seed in (1, 2, 3):
        served(engine, seed)
    held_up(engine)
    for seed in (1, 3):
        engine.submit(turn(seed, TURN + 16))
    engine.core.scheduler.schedule()
    assert waiting(engine) == ["3", "1"], "the KV of session 1 made room for that of session 3"
    engine.rest()
    assert engine.leased == 0


def test_without_overload_the_order_is_that_of_arrival() -> None:
    engine = Stepped(kv_memory="64 blocks", max_running=1)
    served(engine, 3)
    held_up(engine)
    for seed in (1, 3):
        engine.submit(turn(seed, TURN + 16))
    engine.core.scheduler.schedule()
    assert waiting(engine) == ["1", "3"]


def test_who_was_evicted_is_not_passed_for_ever() -> None:
    """A session whose turns follow each other goes on while another one waits, but only so many times."""
    engine = Stepped(**SMALL)
    for seed in (1, 2, 3):
        served(engine, seed)
    held_up(engine)
    evicted, passed = engine.submit(turn(1)), 0
    while not evicted.admitted:
        cached = engine.submit(turn(3))
        engine.until(lambda one=cached: one.is_over or evicted.admitted)
        passed += cached.is_over
    assert 1 <= passed <= 2 * 4, "with two waiting"


def orders_of(engine: Stepped, clock: Callable[[], float]) -> tuple[ServiceOrders, SessionCaching]:
    cache = engine.core.parts.cache
    sessions = SessionCaching(cache, clock=clock)
    return ServiceOrders(cache, sessions, clock), sessions


def test_live_contexts_are_forgotten_with_time_and_calls_of_no_session_at_once() -> None:
    engine, now = Stepped(**SMALL), 0.0
    orders, sessions = orders_of(engine, lambda: now)
    some = [engine.sequence(turn(seed, 200)) for seed in range(4)]
    for number, sequence in enumerate(some):
        sequence.turn = sessions.arrived(sequence.request) if number < 2 else None
        orders.arrived(sequence)
    assert orders.overloaded
    for sequence in some:
        orders.ended(sequence)
        orders.ended(sequence)
        orders._live.check_integrity()
    assert orders.overloaded, "two contexts of 200 tokens"
    now = 1000.0
    assert not orders.overloaded


def test_what_waits_is_protected_by_its_place_in_the_order_of_service() -> None:
    engine = Stepped(**SMALL)
    for seed in (1, 2, 3):
        served(engine, seed)
    held_up(engine)
    calls = {seed: engine.submit(turn(seed, TURN + 16)) for seed in (1, 2, 3)}
    engine.core.scheduler.schedule()
    assert waiting(engine)[-1] == "1"
    places = engine.core.parts.sessions.ledger._places
    assert waiting(engine) == [str(one) for one in sorted(calls, key=lambda one: places[calls[one].turn.session])]  # type: ignore[union-attr]


@pytest.mark.parametrize("stage", ["waiting", "running"])
def test_who_is_aborted_leaves_nothing_behind(stage: str) -> None:
    engine = Stepped(**SMALL)
    for seed in (1, 2, 3):
        served(engine, seed)
    running = held_up(engine)
    calls = [engine.submit(turn(seed, TURN + 16)) for seed in (1, 2, 3)]
    engine.core.scheduler.schedule()
    victim = running if stage == "running" else calls[1]
    assert engine.core.requests.cancel(victim.request.request_id)
    engine.rest()
    service = engine.core.scheduler._service
    assert service is not None and not service._live and not service._orders and not service._arranged
    assert all(one.is_over for one in calls)
    assert engine.leased == 0


def test_thirty_two_sessions_of_two_tenants_on_a_small_pool_all_end() -> None:
    """With aborts and calls without reuse among them, and never out of its books."""
    rng, engine = Random(0), Stepped(kv_memory="40 blocks", max_running=3)
    calls = []
    for number in range(96):
        seed = rng.randrange(32)
        reuse = rng.choice([ReuseMode.EXACT, ReuseMode.EXACT, ReuseMode.OFF])
        tenant = STRANGER if seed % 4 == 0 else "tenant"
        request = turn(seed, rng.choice([40, 100, 160]), tenant, reuse)
        calls.append(engine.submit(request))
        for _ in range(rng.randrange(4)):
            engine.step()
        if number % 7 == 0:
            engine.core.requests.cancel(rng.choice(calls).request.request_id)
        service = engine.core.scheduler._service
        assert service is not None
        service._live.check_integrity()
        assert sorted(map(id, engine.core.scheduler.waiting)) == sorted(
            id(one) for o in service._orders.values() for one in o._places
        )
    engine.rest()
    assert all(one.is_over for one in calls)
    assert not service._live and not service._orders
