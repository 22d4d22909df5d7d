"""Cold prompts are held back only under all conditions together, and never where nothing runs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kedge.policies.service import ACTIVE_SHARE, MOST, WAIT_SHARE, StepTimes, may_start

CAPACITY = 1000
ROOM = int(ACTIVE_SHARE * CAPACITY)
shares, tokens = st.floats(0, 1), st.integers(1, 2 * CAPACITY)


def times(decode: float = 0.001, per_token: float = 0.01, answer: int = 10) -> StepTimes:
    """Times in which an answer takes 0.01 seconds and a prompt of 100 tokens one."""
    found = StepTimes()
    found.step(1, 1, decode)
    found.step(1000, 1, 1000 * per_token)
    found.answered(answer)
    return found


SHORT = times()


@given(tokens, shares, shares)
def test_where_nothing_runs_everything_starts(size: int, missing: float, returning: float) -> None:
    assert may_start(size, missing, 0, CAPACITY, returning, SHORT)


@given(tokens, st.floats(0, MOST, exclude_max=True), tokens, shares)
def test_what_is_cached_starts_at_any_time(size: int, missing: float, running: int, returning: float) -> None:
    assert may_start(size, missing, running, CAPACITY, returning, SHORT)


@given(tokens, shares, tokens, st.floats(0, MOST, exclude_max=True))
def test_where_sessions_do_not_come_back_nothing_is_held_back(
    size: int, missing: float, running: int, returning: float
) -> None:
    assert may_start(size, missing, running, CAPACITY, returning, SHORT)


def test_a_cold_prompt_waits_until_little_runs() -> None:
    assert may_start(100, 1.0, ROOM - 100, CAPACITY, 1.0, SHORT)
    assert not may_start(100, 1.0, ROOM - 99, CAPACITY, 1.0, SHORT)
    assert not may_start(100, MOST, ROOM, CAPACITY, MOST, SHORT)


def test_what_takes_less_time_than_the_answers_before_it_is_not_held_back() -> None:
    answer_s = 10 * SHORT.decode
    edge = round(answer_s / (WAIT_SHARE * SHORT.per_token))
    assert not may_start(100 * edge, 1.0, CAPACITY, CAPACITY, 1.0, SHORT)
    assert may_start(100, 1.0, CAPACITY, CAPACITY, 1.0, times(answer=1000))
    assert may_start(100, 1.0, CAPACITY, CAPACITY, 1.0, times(decode=1.0))


def test_before_steps_were_measured_nothing_is_held_back() -> None:
    only_decodes = StepTimes()
    only_decodes.step(1, 1, 0.001)
    for unknown in (StepTimes(), only_decodes):
        assert may_start(100, 1.0, CAPACITY, CAPACITY, 1.0, unknown)


def test_idle_time_between_steps_is_forgotten_and_slower_machines_are_noticed() -> None:
    found = times()
    found.step(1, 1, 100.0)
    assert found.decode < 0.002
    for _ in range(1000):
        found.step(1, 1, 0.5)
    assert found.decode == 0.5
