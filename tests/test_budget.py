"""The package stays within its budgets, and they only go down."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from kedge.cli.main import app
from kedge.settings import Settings
from tests.budget import ROOT, commands, constants, history, lines, lines_by_room, overspent, settings

HISTORY = list(history())
BUDGET = HISTORY[-1]


def test_rooms_stay_within_their_budgets() -> None:
    spent = lines_by_room(BUDGET.rooms)
    assert set(spent) <= set(BUDGET.rooms), "a new room needs a budget, which other rooms give"
    assert not overspent(spent, BUDGET.rooms)


@pytest.mark.parametrize(
    ("what", "find"),
    [
        ("lines", lambda: sum(lines_by_room(BUDGET.rooms).values())),
        ("settings", lambda: len(list(settings(Settings)))),
        ("constants", lambda: len(constants())),
        ("commands", lambda: len(list(commands(app)))),
        ("words_of_docs", lambda: sum(len(page.read_text("utf-8").split()) for page in (ROOT / "docs").rglob("*.md"))),
        ("lines_of_benchmarks", lambda: sum(map(lines, (ROOT / "benchmarks").rglob("*.py")))),
        ("lines_of_tests", lambda: sum(map(lines, (ROOT / "tests").rglob("*.py")))),
    ],
)
def test_the_whole_stays_within_its_budget(what: str, find: Callable[[], int]) -> None:
    spent, most = find(), BUDGET.whole[what]
    assert spent <= most, f"{what}: {spent} of {most}: something has to give {spent - most}"


def test_the_rooms_have_the_lines_of_the_whole() -> None:
    assert sum(BUDGET.rooms.values()) == BUDGET.whole["lines"]


def test_budgets_only_go_down() -> None:
    """From one commit to the next, and so also that of a room unless others give what it takes."""
    for before, after in pairwise(HISTORY):
        assert set(before.whole) <= set(after.whole), "a budget was dropped"
        assert all(after.whole[what] <= most for what, most in before.whole.items())
