"""The baseline that keeps what tool calls follow for their usual time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.sessions.measure import EDGES, QUANTILE, ToolTimes, ttl_hit_rate
from kedge.bench.sessions.arrivals import Arrival
from kedge.bench.sessions.measure import leading
from tests.bench.sessions.builders import arrival, traffic


def test_bins_span_a_quarter_of_a_second_to_a_day() -> None:
    assert len(EDGES) == 57
    assert (EDGES[0], EDGES[1], EDGES[-1]) == (0.0, 0.25, pytest.approx(1e5))
    assert EDGES[3] / EDGES[2] == pytest.approx(EDGES[2] / EDGES[1])


def test_the_quantile_is_the_upper_end_of_its_bin() -> None:
    times = ToolTimes()
    for _ in range(1000):
        times.add(1.0)
    first = next(edge for edge in EDGES if edge > 1.0)
    assert times.quantile(0.5) == first
    for _ in range(9000):
        times.add(0.0)
    assert times.quantile(0.5) == EDGES[1]
    assert times.quantile(0.95) == first
    times.add(1e9)
    assert times.quantile(1.0) == EDGES[-1]


def naive(arrivals: list[Arrival], capacity: int) -> int:
    """Keep chains by session and look at all of them for each block that has to go."""
    times, hits = ToolTimes(), 0
    chains: dict[str, list[int]] = {}
    last: dict[str, Arrival] = {}
    cached: list[int] = []
    dead: list[int] = []
    for now in arrivals:
        chain = list(now.chain[:capacity])
        if (before := last.get(now.session)) and before.turn.record.stop == "tool":
            times.add(max(0.0, now.at - before.ends_at))
        hits += leading(chain, cached)
        old = chains.get(now.session, [])
        chains[now.session] = chain
        held = {block for one in chains.values() for block in one}
        dead += [block for block in old if block not in held and block in cached]
        dead = [block for block in dead if block not in held]
        order = list(last)

        def key(session: str, now: Arrival = now, order: list[str] = order) -> tuple[bool, float, int]:
            one = last[session]
            ttl = times.quantile(QUANTILE) if one.turn.record.stop != "user" else 0.0
            left = one.ends_at + ttl - now.at
            return left <= 0, (-one.at if left <= 0 else left), order.index(session)

        while len(set(cached) | set(chain)) > capacity:
            if dead:
                cached.remove(dead.pop(0))
                continue
            victim = max((one for one in last if chains[one] and one != now.session), key=key)
            block = chains[victim].pop()
            if block in cached and not any(block in one for one in chains.values()):
                cached.remove(block)
        cached += [block for block in chain if block not in cached]
        last[now.session] = now
    return hits


@given(traffic(), st.integers(1, 25))
@settings(deadline=None, max_examples=200)
def test_it_is_its_naive_twin(arrivals: list[Arrival], capacity: int) -> None:
    total = sum(len(one.chain) for one in arrivals)
    assert ttl_hit_rate(arrivals, capacity) == pytest.approx(naive(arrivals, capacity) / total)


def test_a_pause_for_a_person_is_not_kept() -> None:
    def rate(stop: str) -> float:
        """Two sessions of four blocks take turns in room for six; the first has paused for `stop`."""
        warm = [arrival(float(at), "w", [90], "tool") for at in range(40)]
        first, second = [0, 1, 2, 3], [10, 11, 12, 13]
        rest = [arrival(50, "a", first, stop), arrival(50.5, "b", second, "user"), arrival(51, "c", [20], "user")]
        return ttl_hit_rate([*warm, *rest, arrival(51.2, "a", first)], 6)

    assert rate("tool") >= rate("user")
