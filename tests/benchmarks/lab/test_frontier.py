"""The frontier: which rows no other one beats."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lab.methods import METHODS
from benchmarks.studies.papers import swept, with_best

POINTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12)


@given(POINTS)
def test_a_row_is_on_the_frontier_unless_another_one_is_better_in_one_thing_and_worse_in_none(
    points: list[tuple[int, int]],
) -> None:
    rows = with_best([{"computed": float(x), "kl": float(y)} for x, y in points])
    best = [point for point, row in zip(points, rows, strict=True) if row["best"]]
    assert best, "something always is"
    for x, y in points:
        dominating = [one for one in points if one != (x, y) and one[0] <= x and one[1] <= y]
        assert ((x, y) in best) == (not dominating)


def test_every_level_of_a_method_is_one_of_its_own_and_the_default_is_among_them() -> None:
    for quick in (True, False):
        methods = swept(quick=quick)
        assert methods["kedge", "default"] == METHODS["kedge"]
        levels = [one.anchors["weak_error"] for (name, _), one in methods.items() if name == "token"]
        assert levels == sorted(set(levels)) and len(levels) > 1
