"""Errors of sentinel tokens: what refutes, what is unusual, and who is blamed."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.reuse.guard.record import (
    FORGET,
    SETTLED,
    SentinelFinding,
    SentinelVerdict,
    UsualError,
    judge_drawn,
    judge_weak,
)

USUAL, UNUSUAL, REFUTED = SentinelFinding
NEW = UsualError()
JUDGES = judge_drawn, judge_weak


def usual(error: float, calls: int = SETTLED) -> UsualError:
    made = UsualError()
    for _ in range(calls):
        made.observe(error)
    return made


@given(st.lists(st.floats(0, 10), min_size=1, max_size=40))
def test_the_usual_error_is_the_mean_of_what_was_seen(errors: list[float]) -> None:
    made = UsualError()
    for error in errors:
        made.observe(error)
    assert made.mean == pytest.approx(sum(errors) / len(errors), abs=1e-9)


def test_the_usual_error_follows_what_changes() -> None:
    made = usual(0.1, 1000)
    for _ in range(round(1 / FORGET)):
        made.observe(0.5)
    assert 0.3 < made.mean < 0.5


def test_all_are_blamed_where_none_alone_is_off() -> None:
    verdict = judge_drawn({"a": [0.49], "b": [0.5] * 9, "c": [0.51, 0.51]}, dict.fromkeys("abc", NEW), 0.5)
    assert verdict == SentinelVerdict(REFUTED, frozenset("c"))
    settled = {"a": usual(0.5), "b": usual(0.1)}
    assert judge_weak({"a": [0.9] * 4, "b": [0.4] * 4}, settled, 0.5) == SentinelVerdict(REFUTED, frozenset("ab"))


def test_a_drawn_error_is_unusual_for_its_placeholder() -> None:
    settled = {"a": usual(0.1), "b": usual(0.1, SETTLED - 1)}
    assert judge_drawn({"a": [0.19], "b": [0.45]}, settled, 0.5).finding is USUAL
    assert judge_drawn({"a": [0.21], "b": [0.1]}, settled, 0.5).finding is UNUSUAL


@pytest.mark.parametrize("seen, found", [(0.4, USUAL), (0.46, UNUSUAL), (0.59, UNUSUAL), (0.61, REFUTED)])
def test_weak_tokens_are_judged_together_by_what_is_usual(seen: float, found: SentinelFinding) -> None:
    settled = {"a": usual(0.2), "b": usual(0.4)}
    assert judge_weak({"a": [seen] * 4, "b": [seen] * 4}, settled, 0.5).finding is found


def test_weak_tokens_below_the_limit_never_refute() -> None:
    assert judge_weak({"a": [0.49] * 8}, {"a": usual(0.01)}, 0.5).finding is UNUSUAL


def test_few_weak_tokens_and_new_ones_say_nothing() -> None:
    assert judge_weak({"a": [5.0] * 3}, {"a": usual(0.2)}, 0.5).finding is USUAL
    assert judge_weak({"a": [5.0] * 9}, {"a": usual(0.2, SETTLED - 1)}, 0.5).finding is USUAL


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_what_is_not_a_number_refutes(judge: Callable[..., SentinelVerdict], error: float) -> None:
    for known in (NEW, usual(0.2)):
        verdict = judge({"a": [error], "b": [0.1] * 20}, {"a": known, "b": known}, 0.5)
        assert verdict == SentinelVerdict(REFUTED, frozenset("a"))
