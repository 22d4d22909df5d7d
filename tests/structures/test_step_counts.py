from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kedge.structures.heaps import StepCounts


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=200))
def test_the_least_is_that_of_a_naive_list(operations: list[tuple[bool, int]]) -> None:
    steps, naive = StepCounts(), []
    for add, step in operations:
        if add or step not in naive:
            steps.add(step)
            naive.append(step)
        else:
            steps.remove(step)
            naive.remove(step)
        assert steps.least == min(naive, default=None)
        assert sorted(steps.counts.elements()) == sorted(naive)


def test_outdated_entries_do_not_pile_up() -> None:
    steps = StepCounts()
    steps.add(0)
    for _ in range(1000):
        steps.add(5)
        steps.remove(5)
    assert len(steps._heap) < 20 and steps.least == 0
