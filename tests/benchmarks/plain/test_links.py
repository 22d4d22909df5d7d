"""What counts as right and wrong, and that the product's tracker is what is measured."""

from __future__ import annotations

from hypothesis import given

from benchmarks.plain.measure import measure_links
from kedge.bench.sessions.arrivals import Arrival
from kedge.policies.sessions import SessionHints, SessionKey, SessionTracker
from kedge.policies.sessions.turns import NO_HINTS, Chain
from kedge.types import Namespace
from tests.bench.sessions.builders import arrival, traffic


class ByLength(SessionTracker):
    """Gives every prompt to one session if it is long enough, and else to a new one."""

    def arrive(self, namespace: Namespace, chain: Chain, now: float, hints: SessionHints = NO_HINTS) -> SessionKey:
        hints = SessionHints(session="same") if len(chain) > 2 else hints
        return super().arrive(namespace, (int(1e6 * now),), now, hints)


def test_each_request_is_right_wrong_or_not_linked() -> None:
    arrivals = [
        arrival(0.0, "a", [1, 2, 3]),  # right: a new session
        arrival(1.0, "a", [1, 2, 3, 4]),  # right
        arrival(2.0, "b", [7, 8, 9]),  # wrong: a's
        arrival(3.0, "a", [1, 2, 3, 4]),  # wrong: now b's
        arrival(4.0, "a", [1]),  # begins a session too many
    ]
    found = measure_links(arrivals, ByLength())
    assert (found.requests, found.right, found.wrong) == (5, 2, 2)
    assert found.as_json() == {"requests": 5, "right": 0.4, "wrong": 0.4}
    assert found.us_per_request > 0


def test_sessions_that_only_grow_are_all_found() -> None:
    grown = [arrival(at, f"s{at % 3}", range(100 * (at % 3), 100 * (at % 3) + 2 + at // 3)) for at in range(30)]
    assert measure_links(grown).right == 30


def test_an_answer_ends_before_the_next_request_of_its_session() -> None:
    slow = [arrival(0.0, "a", [1], seconds=9.0), arrival(1.0, "a", [1, 2])]
    slow[0].next_at = 1.0
    assert measure_links(slow).right == 2


@given(traffic())
def test_every_request_counts_once(arrivals: list[Arrival]) -> None:
    arrivals.sort(key=lambda one: one.at)
    found = measure_links(arrivals) if arrivals else None
    assert found is None or 0 <= found.right + found.wrong <= found.requests == len(arrivals)
