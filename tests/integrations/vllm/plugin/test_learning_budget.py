"""When background work is done beside requests: learning in a worker, and base prefills by the scheduler."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from hypothesis import given
from hypothesis import strategies as st

from kedge.engine.common.guarding.guarded_calls import GRACE
from kedge.integrations.vllm.plugin.learning_budget import PATIENCE, BaseShare, LearningBudget
from kedge.policies.service import StepTimes
from kedge.reuse.costs import LEARNING_SHARE

PIECE = 0.01


class Stage:
    """A budget with a clock that only passes and learning move."""

    def __init__(self, *, is_timed: bool = True, piece: float = PIECE) -> None:
        self.now = self.learned = 0.0
        self.piece = piece
        self.budget = LearningBudget(is_timed=is_timed, clock=lambda: self.now)

    def learn(self) -> bool:
        self.now += self.piece
        self.learned += self.piece
        return True

    def step(self, seconds: float, *, idle: bool = False, is_awaited: bool = False) -> float:
        """Returns how long was learned."""
        before = self.learned
        self.now += seconds
        if not idle:
            self.budget.computes()
        self.budget.spend(self.learn, 0.0 if idle else seconds, is_awaited=is_awaited)
        return self.learned - before


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 100))
def test_learning_takes_a_share_of_the_passes_and_at_most_one_piece_more(passes: list[int], piece: int) -> None:
    stage = Stage(piece=piece / 1000)
    for milliseconds in passes:
        stage.step(milliseconds / 1000)
    earned = LEARNING_SHARE * sum(passes) / 1000
    assert earned - 1e-9 <= stage.learned <= earned + piece / 1000 + 1e-9, "all that was earned is spent"


def test_what_nothing_was_learned_for_is_not_saved_up() -> None:
    stage = Stage()
    for _ in range(100):
        stage.budget.spend(lambda: False, 1.0, is_awaited=False)
    assert stage.step(0.015) == pytest.approx(PIECE)


def test_an_idle_step_is_for_one_piece() -> None:
    stage = Stage()
    assert [stage.step(5.0, idle=True) for _ in range(3)] == pytest.approx([PIECE] * 3)


@pytest.mark.parametrize("is_timed", [False, True])
@pytest.mark.parametrize("idle", [False, True])
def test_first_tokens_do_not_wait_for_learning_but_for_every_so_many(is_timed: bool, idle: bool) -> None:
    stage = Stage(is_timed=is_timed)
    found = [stage.step(0.02, idle=idle, is_awaited=True) > 0 for _ in range(2 * (PATIENCE + 1))]
    assert found == 2 * ([False] * PATIENCE + [True])


@pytest.mark.parametrize("idle", [False, True])
def test_what_was_earned_meanwhile_is_spent_once_the_first_token_is_read(idle: bool) -> None:
    stage = Stage()
    assert not stage.step(0.1, is_awaited=True)
    assert not stage.step(0.02, idle=idle), "it is read once this step has been started"
    assert stage.step(0.02) == pytest.approx(0.06 if idle else 0.07)


def test_an_engine_that_has_just_become_idle_does_not_learn() -> None:
    stage = Stage()
    stage.budget.computes()
    assert not stage.step(GRACE / 2, idle=True)
    assert stage.step(GRACE / 2, idle=True)


def test_without_clocks_in_common_a_step_is_for_one_piece() -> None:
    stage = Stage(is_timed=False)
    assert [stage.step(1.0), stage.step(0.0, idle=True)] == pytest.approx([PIECE, PIECE])


# base prefills --------------------------------------------------------------------------------------------------------


def times() -> StepTimes:
    """Decode steps take as long as ten tokens of a prompt."""
    found = StepTimes()
    found.step(1, 1, 0.02)
    found.step(100, 1, 0.2)
    return found


def test_a_decode_step_gives_as_much_time_as_it_takes_itself() -> None:
    assert BaseShare(times()).beside(0, 64) == 10
    assert BaseShare(StepTimes()).beside(0, 64) == 32, "before times are known it is half of the tokens"


def test_steps_with_prefills_are_passed_over_a_few_times_in_a_row() -> None:
    share = BaseShare(times())
    found = [share.beside(40, 64) for _ in range(2 * (PATIENCE + 1))]
    assert found == 2 * ([0] * PATIENCE + [50])
    assert [share.beside(*step) for step in ((40, 64), (0, 64), (0, 64))] == [0, 0, 10], "its token is read in the next"
    assert [share.beside(40, 64) for _ in range(PATIENCE)] == [0] * PATIENCE
    assert share.beside(100, 64) == 64, "never more than is left"


def test_an_idle_engine_waits_a_moment_and_computes_a_piece_at_a_time() -> None:
    now = [0.0]
    share = BaseShare(times(), lambda: now[0])
    assert share.idle(1000) == 25, "of 2 ms each"
    share.computes()
    assert share.idle(1000) == 0
    now[0] = GRACE
    assert share.idle(1000) == 25 and share.idle(3) == 3
    assert BaseShare(StepTimes()).idle(1000) == 1000
