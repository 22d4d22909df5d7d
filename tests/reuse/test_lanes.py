"""Lanes of waiting prompts: what fits, what is cut, and that every prompt is admitted in the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.reuse.costs import PATIENCE
from kedge.reuse.holes import Holes
from kedge.reuse.lanes import LaneBudget, WaitingPrompt, fits, fitted, grant, lane_tokens
from tests.reuse.test_holes import SIZE, layouts, positions

FOUR: Holes = (range(40, 60), range(95, 97), range(150, 151), range(290, 300))
BUDGETS = st.builds(LaneBudget, st.integers(-3, 40), st.integers(-3, 6))


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (LaneBudget(23, 3), FOUR),
        (LaneBudget(99, 2), (range(40, 97), range(150, 151), range(290, 300))),
        (LaneBudget(22, 3), (range(40, 60), range(95, 97), range(150, 300))),
        (LaneBudget(20, 9), (range(40, 60), range(95, 300))),
        (LaneBudget(19, 9), (range(40, 300),)),
        (LaneBudget(58, 2), (range(40, 97), range(150, 151), range(290, 300))),
        (LaneBudget(57, 1), (range(40, 97), range(150, 300))),
        (LaneBudget(56, 2), (range(40, 60), range(95, 97), range(150, 300))),
        (LaneBudget(99, 0), (range(40, 300),)),
        (LaneBudget(-5, -5), (range(40, 300),)),
    ],
)
def test_too_many_holes_are_merged_and_too_long_ones_cut(budget: LaneBudget, expected: Holes) -> None:
    assert fitted(FOUR, budget) == expected


@given(layouts(), BUDGETS)
def test_what_is_fitted_fits_and_contains_the_holes(holes: Holes, budget: LaneBudget) -> None:
    found = fitted(holes, budget)
    assert fits(found, budget)
    assert positions(found) >= positions(holes)
    assert (found[0].start, found[-1].stop) == (holes[0].start, holes[-1].stop)
    if fits(holes, budget):
        assert found == holes


WAITING = st.lists(
    st.tuples(st.one_of(st.just(()), layouts()), st.integers(1, 60), st.integers(0, PATIENCE)), max_size=6
).map(
    lambda listed: [
        WaitingPrompt(f"r{at}", tokens, holes, refusals) for at, (holes, tokens, refusals) in enumerate(listed)
    ]
)


@given(WAITING, BUDGETS, st.integers(0, 40))
def test_all_grants_together_fit_beside_the_running_requests(
    waiting: list[WaitingPrompt], budget: LaneBudget, demand: int
) -> None:
    granted = grant(waiting, budget, demand)
    with_lanes = [holes for holes in granted.values() if len(holes) > 1]
    assert sum(map(lane_tokens, with_lanes)) + demand + len(with_lanes) <= max(budget.tokens, 0) or not with_lanes
    assert sum(len(holes) - 1 for holes in with_lanes) + len(granted) <= max(budget.rows, 0) or not granted
    wanted = [prompt.key for prompt in waiting if len(prompt.holes) > 1]
    assert list(granted) == wanted[: len(granted)], "in the order of service"
    assert all(positions(granted[one.key]) >= positions(one.holes) for one in waiting if one.key in granted)


@given(layouts(), st.integers(1, 40), st.integers(1, 6))
def test_alone_a_prompt_is_granted_at_once(holes: Holes, tokens: int, rows: int) -> None:
    if len(holes) > 1:
        granted = grant([WaitingPrompt("r", SIZE, holes)], LaneBudget(tokens, rows), 0)
        assert granted == {"r": fitted(holes, LaneBudget(tokens - 1, rows - 1))}


def test_lanes_take_only_what_running_and_earlier_and_waiting_requests_leave() -> None:
    holed, plain = WaitingPrompt("h", 300, FOUR), WaitingPrompt("p", 20)
    assert grant([holed], LaneBudget(64, 8), demand=40) == {"h": FOUR}
    assert grant([holed], LaneBudget(64, 8), demand=41) == {}, "it waits rather than being cut"
    assert grant([plain, holed], LaneBudget(64, 8), demand=20) == {"h": FOUR}
    assert grant([plain, holed], LaneBudget(64, 8), demand=21) == {}
    late = WaitingPrompt("h", 300, FOUR, PATIENCE)
    assert grant([late], LaneBudget(64, 8), demand=41) == {"h": (range(40, 60), range(95, 97), range(150, 300))}
    one, other = WaitingPrompt("a", 300, FOUR), WaitingPrompt("b", 300, (range(5, 6), range(299, 300)))
    assert grant([one, other], LaneBudget(64, 8), demand=0).keys() == {"a", "b"}
    assert grant([one, other], LaneBudget(64, 8), demand=45) == {}


def test_no_row_is_granted_to_those_that_cannot_be_admitted() -> None:
    plain = [WaitingPrompt(f"p{at}", 1) for at in range(4)]
    assert grant([*plain, WaitingPrompt("h", 300, FOUR)], LaneBudget(64, 4), 0) == {}
    assert grant([*plain, WaitingPrompt("h", 300, FOUR)], LaneBudget(64, 5), 0) == {"h": (range(40, 300),)}
