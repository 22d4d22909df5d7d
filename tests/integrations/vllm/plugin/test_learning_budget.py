"""Learning takes a share of the time of passes, whatever one piece of it takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.engine.common.guarding.guarded_calls import GRACE
from kedge.integrations.vllm.plugin.learning_budget import MAX_CREDIT, PATIENCE, LearningBudget


class Stage:
    """A budget with a clock that only passes and learning move."""

    def __init__(self, share: float | None, piece: float, pieces: int = 10**6) -> None:
        self.now = self.learned = 0.0
        self.pieces, self._piece = pieces, piece
        self.budget = LearningBudget(share, lambda: self.now)

    def learn(self) -> bool:
        if not self.pieces:
            return False
        self.pieces -= 1
        self.now += self._piece
        self.learned += self._piece
        return True

    def step(self, seconds: float, *, idle: bool = False, is_awaited: bool = False) -> float:
        """Returns how long was learned."""
        before = self.learned
        self.budget.begin()
        self.now += seconds
        self.budget.spend(self.learn, idle=idle, is_awaited=is_awaited)
        return self.learned - before


@given(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.lists(st.integers(1, 50), max_size=40), st.integers(1, 100))
def test_a_share_of_the_passes_and_at_most_one_piece_more(share: float, passes: list[int], piece: int) -> None:
    stage = Stage(share, piece / 1000)
    for milliseconds in passes:
        stage.step(milliseconds / 1000)
    earned = share * sum(passes) / 1000
    assert stage.learned <= earned + piece / 1000 + 1e-9
    assert stage.learned >= earned - 1e-9 or not share, "all that was earned is spent"


def test_without_a_share_nothing_is_learned_in_a_pass() -> None:
    stage = Stage(0.0, 0.01)
    stage.step(1.0)
    assert not stage.learned


def test_an_idle_step_is_for_one_piece() -> None:
    stage = Stage(0.0, 0.01)
    for _ in range(3):
        stage.step(5.0, idle=True)
    assert stage.learned == pytest.approx(0.03)


def test_passes_save_up_so_much_and_no_more() -> None:
    stage = Stage(0.5, 0.01, pieces=0)
    for _ in range(100):
        stage.step(1.0)
    stage.pieces = 1000
    stage.step(0.0)
    assert MAX_CREDIT <= stage.learned <= MAX_CREDIT + 0.01 + 1e-9


@pytest.mark.parametrize("share", [0.5, None])
@pytest.mark.parametrize("idle", [False, True])
def test_first_tokens_do_not_wait_for_learning_but_for_every_so_many(share: float | None, idle: bool) -> None:
    stage = Stage(share, 0.01)
    found = [stage.step(0.02, idle=idle, is_awaited=True) > 0 for _ in range(2 * (PATIENCE + 1))]
    assert found == 2 * ([False] * PATIENCE + [True])


@pytest.mark.parametrize("idle", [False, True])
def test_what_was_earned_meanwhile_is_spent_once_the_first_token_is_read(idle: bool) -> None:
    stage = Stage(0.5, 0.01)
    assert not stage.step(0.1, is_awaited=True)
    assert not stage.step(0.02, idle=idle), "it is read once this step has been started"
    assert stage.step(0.02) == pytest.approx(0.06 if idle else 0.07)


def test_an_engine_that_has_just_become_idle_does_not_learn() -> None:
    stage = Stage(0.0, 0.01)
    stage.step(1.0)
    assert not stage.step(GRACE / 2, idle=True)
    assert stage.step(GRACE / 2, idle=True)


def test_without_clocks_in_common_a_step_is_for_one_piece() -> None:
    stage = Stage(None, 0.01)
    assert [stage.step(1.0), stage.step(0.0, idle=True)] == pytest.approx([0.01, 0.01])
