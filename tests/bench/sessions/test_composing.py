"""Arrivals composed of conversations, and the working set that they make."""

from __future__ import annotations

import random

import pytest
from hypothesis import given

from kedge.bench.sessions.arrivals import (
    Arrival,
    Conversation,
    as_recorded,
    compose,
    conversations,
    is_traffic,
    working_set,
)
from tests.bench.sessions.builders import record, traffic


def conversation(name: str, times: list[float], seconds: float = 2.0, tools: int = 512) -> Conversation:
    turns = [record(c=name, s=name, t=at, turn=turn, dur=seconds, tools=tools) for turn, at in enumerate(times)]
    return conversations(turns)[0]


def test_gaps_are_cut_beyond_the_server_s_own_time() -> None:
    arrivals = compose([conversation("a", [0.0, 5.0, 105.0])], live=1, cap=10.0, limit=3)
    start = arrivals[0].at
    assert 0 <= start < 300
    assert [one.at - start for one in arrivals] == pytest.approx([0.0, 5.0, 5.0 + 10.0 + 2.0])


def test_a_slot_goes_on_with_a_copy_that_shares_only_what_is_fixed() -> None:
    arrivals = compose([conversation("a", [0.0, 5.0])], live=1, cap=60.0, limit=4)
    assert [one.session for one in arrivals] == ["a#0", "a#0", "a#1", "a#1"]
    first, copy = arrivals[0].chain, arrivals[2].chain
    assert first[0] == copy[0] and not set(first[1:]) & set(copy[1:])
    assert 1 <= arrivals[2].at - (arrivals[1].at + 2.0) <= 60


def test_so_many_conversations_run_at_once() -> None:
    many = [conversation(f"c{at}", [0.0, 50.0, 100.0]) for at in range(7)]
    arrivals = compose(many, live=3, cap=3600.0, limit=60)
    assert len(arrivals) == 60
    assert [one.at for one in arrivals] == sorted(one.at for one in arrivals)
    for now in (one.at for one in arrivals):
        begun = {one.session for one in arrivals if one.at <= now}
        going = [name for name in begun if any(one.at + 2.0 >= now for one in arrivals if one.session == name)]
        assert len(going) <= 3


def test_a_limit_only_cuts() -> None:
    many = [conversation(f"c{at}", [0.0, 10.0 * at, 30.0 * at]) for at in range(5)]
    long, short = (compose(many, live=2, cap=60.0, limit=limit) for limit in (90, 20))
    assert [(one.at, one.session, one.chain) for one in long[:20]] == [(o.at, o.session, o.chain) for o in short]


def test_the_order_follows_the_seed() -> None:
    many = [conversation(f"c{at}", [0.0]) for at in range(9)]
    order = list(range(9))
    random.Random(4).shuffle(order)
    arrivals = compose(many, live=1, cap=1.0, seed=4, limit=9)
    assert [one.session for one in arrivals] == [f"c{at}#0" for at in order]


def test_a_conversation_is_played_so_often_at_most() -> None:
    assert len(compose([conversation("a", [0.0])], live=2, cap=1.0, limit=1000)) == 40


def test_traffic_of_many_users_is_replayed_as_recorded() -> None:
    users = [record(s=f"u{at % 2}", t=float(at)) for at in range(4)]
    (found,) = conversations(users)
    assert is_traffic([found])
    assert not is_traffic([found, found])
    assert not is_traffic(conversations([record(s="a"), record(s="b", parent="a")]))
    arrivals = as_recorded(found, limit=3)
    assert [(one.at, one.session) for one in arrivals] == [(0, "u0"), (1, "u1"), (2, "u0")]


@given(traffic())
def test_the_working_set_is_the_mean_of_live_prompts(arrivals: list[Arrival]) -> None:
    totals = []
    for at, now in enumerate(one.at for one in arrivals):
        last = {one.session: len(one.chain) for one in arrivals[: at + 1]}
        live = [one.session for one in arrivals if one.at >= now]
        totals.append(sum(size for session, size in last.items() if session in live))
    counted = totals[len(totals) // 5 :]
    assert working_set(arrivals) == pytest.approx(sum(counted) / len(counted))
