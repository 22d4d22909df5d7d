"""The order of service in the embedded engine: whose KV is cached goes on under overload, and nobody is left behind."""

from __future__ import annotations

from itertools import count
from random import Random

import pytest

from kedge.engine.local.sequence import RequestSequence
from kedge.engine.local.service_orders import ServiceOrders
from kedge.types import GenerateRequest, Namespace, RequestId, ReuseMode, SamplingParams, Segment
from tests.engine.local.stepping import Stepped
from tests.engine.local.test_fairness import STRANGER
from tests.engine.local.test_translation import tokens

SMALL = {"num_blocks": 18, "max_running": 1}
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


def submit(engine: Stepped, request: GenerateRequest, session: object = None) -> RequestSequence:
    """Submit a turn of a session."""
    sequence = engine.sequence(request)
    sequence.session = session
    return engine.queue(sequence)


def waiting(engine: Stepped) -> list[str]:
    return [one.request.request_id.split("-")[0] for one in engine.core.scheduler.waiting]


def served(engine: Stepped, seed: int) -> None:
    """Serve a turn of a session to its end."""
    submit(engine, turn(seed), seed)
    engine.rest()


def held_up(engine: Stepped) -> RequestSequence:
    """Let a call of one block run, behind which all others wait."""
    running = submit(engine, turn(99, 8))
    engine.step()
    assert running.admitted and not running.is_over
    return running


def test_under_overload_who_is_cached_goes_before_who_was_evicted() -> None:
    engine = Stepped(**SMALL)
    for seed in (1, 2, 3):
        served(engine, seed)
    held_up(engine)
    for seed in (1, 3):
        submit(engine, turn(seed, TURN + 16), seed)
    engine.core.scheduler.schedule()
    assert waiting(engine) == ["3", "1"], "the KV of session 1 made room for that of session 3"
    engine.rest()
    assert engine.leased == 0


def test_without_overload_the_order_is_that_of_arrival() -> None:
    engine = Stepped(num_blocks=64, max_running=1)
    served(engine, 3)
    held_up(engine)
    for seed in (1, 3):
        submit(engine, turn(seed, TURN + 16), seed)
    engine.core.scheduler.schedule()
    assert waiting(engine) == ["1", "3"]


def test_who_was_evicted_is_not_passed_for_ever() -> None:
    """A session whose turns follow each other goes on while another one waits, but only so many times."""
    engine = Stepped(**SMALL)
    for seed in (1, 2, 3):
        served(engine, seed)
    held_up(engine)
    evicted, passed = submit(engine, turn(1), 1), 0
    while not evicted.admitted:
        cached = submit(engine, turn(3), 3)
        engine.until(lambda one=cached: one.is_over or evicted.admitted)
        passed += cached.is_over
    assert 1 <= passed <= 2 * 4, "with two waiting"


def test_live_contexts_are_forgotten_with_time_and_calls_of_no_session_at_once() -> None:
    engine, now = Stepped(**SMALL), 0.0
    orders = ServiceOrders(engine.core.inspection.cache, lambda: now)
    some = [engine.sequence(turn(seed, 200)) for seed in range(4)]
    for number, sequence in enumerate(some):
        sequence.session = number if number < 2 else None
        orders.arrived(sequence)
    assert orders.overloaded
    for sequence in some:
        orders.ended(sequence)
        orders.ended(sequence)
        orders.check_integrity()
    assert orders.overloaded, "two contexts of 200 tokens"
    now = 1000.0
    assert not orders.overloaded


@pytest.mark.parametrize("stage", ["waiting", "running"])
def test_who_is_aborted_leaves_nothing_behind(stage: str) -> None:
    engine = Stepped(**SMALL)
    for seed in (1, 2, 3):
        served(engine, seed)
    running = held_up(engine)
    calls = [submit(engine, turn(seed, TURN + 16), seed) for seed in (1, 2, 3)]
    engine.core.scheduler.schedule()
    victim = running if stage == "running" else calls[1]
    assert engine.core.requests.cancel(victim.request.request_id)
    engine.rest()
    service = engine.core.scheduler._service
    assert service is not None and not service._began and not service._orders and not service._arranged
    assert all(one.is_over for one in calls)
    assert engine.leased == 0


def test_thirty_two_sessions_of_two_tenants_on_a_small_pool_all_end() -> None:
    """With aborts, calls without reuse and of no known session among them, and never out of its books."""
    rng, engine = Random(0), Stepped(num_blocks=40, max_running=3)
    calls = []
    for number in range(96):
        seed = rng.randrange(32)
        reuse = rng.choice([ReuseMode.EXACT, ReuseMode.EXACT, ReuseMode.OFF])
        tenant = STRANGER if seed % 4 == 0 else "tenant"
        request = turn(seed, rng.choice([40, 100, 160]), tenant, reuse)
        calls.append(submit(engine, request, seed if seed % 3 else None))
        for _ in range(rng.randrange(4)):
            engine.step()
        if number % 7 == 0:
            engine.core.requests.cancel(rng.choice(calls).request.request_id)
        service = engine.core.scheduler._service
        assert service is not None
        service.check_integrity()
        assert sorted(map(id, engine.core.scheduler.waiting)) == sorted(
            id(one) for o in service._orders.values() for one in o._places
        )
    engine.rest()
    assert all(one.is_over for one in calls)
    assert not service._began and not service._orders


def test_the_order_is_told_when_it_has_changed_and_not_else() -> None:
    engine, told = Stepped(**SMALL), []
    orders = ServiceOrders(engine.core.inspection.cache, lambda: 0.0, lambda: told.append("changed"))
    queue = engine.core.scheduler.waiting
    for seed in (1, 2):
        sequence = engine.sequence(turn(seed))
        orders.arrived(sequence)
        queue.push(sequence, sequence.tenant, 1)
        orders.arrange(queue)
        orders.arrange(queue)
    assert len(told) == 2
