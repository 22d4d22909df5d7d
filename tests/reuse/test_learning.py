"""Which prompts are learned from, when, and what background work may take beside requests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.errors import TranslationRefused
from kedge.policies.service import StepTimes
from kedge.reuse.costs import GRACE, LEARNING_SHARE, PATIENCE
from kedge.reuse.learning import Backlog, BaseShare, LearningBudget
from kedge.types import GenerateRequest, RunId, RunKey, TenantId

PIECE = 0.01
FIRST, SECOND = (GenerateRequest((), run=RunId(name)).run_key for name in ("first", "second"))


class Books:
    """A backlog of two at most, whose `learned` segments, ended prompts and forgotten runs are noted."""

    def __init__(self) -> None:
        self.lacking = set[str]()
        self.learned, self.over, self.forgotten = list[str](), list[str](), list[RunKey]()
        self.backlog = Backlog[str](self.forgotten.append, lambda one: one not in self.lacking, self.over.append, 2)

    def add(self, name: str, run: RunKey, segments: int = 2, error: Exception | None = None, size: int = 1) -> None:
        if self.backlog.has_room(size):
            self.backlog.add(name, run, self._steps(name, segments, error), size)

    def _steps(self, name: str, segments: int, error: Exception | None) -> Iterator[Any]:
        for _ in range(segments):
            self.learned.append(name)
            yield name
        if error:
            raise error


def test_the_oldest_prompt_is_learned_from_segment_by_segment_and_given_up_beyond_the_bound() -> None:
    books = Books()
    for name in ("a", "b", "c"):
        books.add(name, FIRST)
    assert (books.over, books.backlog.given_up) == (["a"], 1)
    while books.backlog.step():
        pass
    assert books.learned == ["b", "b", "c", "c"] and books.over == ["a", "b", "c"] and books.backlog.observed == 2


def test_prompts_give_way_by_their_size_and_none_to_one_that_is_too_large() -> None:
    books = Books()
    for name, size in (("a", 1), ("b", 1), ("c", 3), ("d", 2)):
        books.add(name, FIRST, size=size)
        assert list(books.backlog) == {"a": ["a"], "b": ["a", "b"], "c": ["a", "b"], "d": ["d"]}[name]
    assert books.over == ["a", "b"]


def test_another_tenants_prompts_are_not_pushed_out() -> None:
    books, other = Books(), GenerateRequest((), tenant=TenantId("other")).run_key
    books.backlog._most = 3
    for name, run in zip("abcde", (other, *[FIRST] * 4), strict=True):
        books.add(name, run)
    assert list(books.backlog) == ["a", "d", "e"]


def test_one_without_its_base_kv_waits_and_goes_on_once_it_has_begun() -> None:
    books = Books()
    books.add("a", FIRST)
    books.add("b", FIRST)
    books.lacking = {"a"}
    assert books.backlog.step() and books.learned == ["b"]
    books.lacking = {"a", "b"}
    assert books.backlog.ready and books.backlog.step() and books.learned == ["b", "b"]
    assert books.backlog.step() and not books.backlog.step() and not books.backlog.ready
    assert list(books.backlog) == ["a"]


@pytest.mark.parametrize("error", [TranslationRefused("offset", 1, "on purpose"), MemoryError("on purpose")])
def test_an_error_loses_one_prompt_and_nothing_else(error: Exception) -> None:
    books = Books()
    books.add("a", FIRST, segments=1, error=error)
    books.add("b", FIRST)
    while books.backlog.step():
        pass
    assert books.over == ["a", "b"] and books.backlog.failed == isinstance(error, MemoryError)


@pytest.mark.parametrize(
    "end", [Backlog.give_up, Backlog.forget, lambda backlog, _: [backlog.step() for _ in range(3)]]
)
def test_a_run_is_forgotten_once_nothing_of_it_is_left_to_learn_from(end: Callable[[Backlog[str], str], None]) -> None:
    books = Books()
    books.add("a", FIRST)
    books.add("b", SECOND)
    for run in (FIRST, FIRST):
        books.backlog.end_run(run)
    assert not books.forgotten
    end(books.backlog, "a")
    assert books.forgotten == [FIRST]
    books.backlog.clear()
    books.backlog.end_run(SECOND)
    assert books.forgotten == [FIRST, SECOND] and books.over == ["a", "b"]


# time -----------------------------------------------------------------------------------------------------------------


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
        stage.budget.spend(lambda: False, 1.0)
    assert stage.step(0.015) == pytest.approx(PIECE)


def test_what_a_pass_under_way_still_takes_is_not_learnings() -> None:
    stage, waits = Stage(), list[float]()

    def settle() -> None:
        waits.append(stage.now)
        stage.now += 100 * PIECE

    stage.budget.settle = settle
    for pieces in (5, 0.5, 2):  # of which half is learning's
        stage.budget.spend(stage.learn, pieces * PIECE)
    assert stage.learned == pytest.approx(4 * PIECE) and len(waits) == 2, "nothing is waited for without credit"


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
    stage.budget.computes()
    stage.budget.spend(stage.learn, 0.0)
    assert not stage.learned, "nor in a step without a pass that follows at once"
    assert stage.step(0.02) == pytest.approx(0.06 if idle else 0.07)


def test_an_engine_that_is_idle_for_a_moment_learns_one_piece_a_step() -> None:
    stage = Stage()
    stage.budget.computes()
    assert [stage.step(GRACE / 2, idle=True) for _ in range(4)] == pytest.approx([0, PIECE, PIECE, PIECE])


def test_without_clocks_in_common_a_step_is_for_one_piece() -> None:
    stage = Stage(is_timed=False)
    assert [stage.step(1.0), stage.step(0.0, idle=True)] == pytest.approx([PIECE, PIECE])


def times() -> StepTimes:
    """Decode steps take as long as ten tokens of a prompt."""
    found = StepTimes()
    found.step(1, 1, 0.02)
    found.step(100, 1, 0.2)
    return found


def test_a_decode_step_gives_base_prefills_as_much_time_as_it_takes_itself() -> None:
    assert BaseShare(times()).beside(0, 64) == 10
    assert BaseShare(StepTimes()).beside(0, 64) == 32, "before times are known it is half of the tokens"


def test_base_prefills_pass_over_steps_with_prefills_a_few_times_in_a_row() -> None:
    share = BaseShare(times())
    found = [share.beside(40, 64) for _ in range(2 * (PATIENCE + 1))]
    assert found == 2 * ([0] * PATIENCE + [50])
    assert [share.beside(*step) for step in ((40, 64), (0, 64), (0, 64))] == [0, 0, 10], "its token is read in the next"
    assert [share.beside(40, 64) for _ in range(PATIENCE)] == [0] * PATIENCE
    assert share.beside(100, 64) == 64, "never more than is left"


def test_an_idle_engine_waits_a_moment_and_computes_base_prefills_a_piece_at_a_time() -> None:
    now = [0.0]
    share = BaseShare(times(), lambda: now[0])
    assert share.idle(1000) == 25, "of 2 ms each"
    share.computes()
    assert share.idle(1000) == 0
    now[0] = GRACE
    assert share.idle(1000) == 25 and share.idle(3) == 3
    assert BaseShare(StepTimes()).idle(1000) == 1000
