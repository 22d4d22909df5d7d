from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kedge.structures.heaps import LazyHeap, StepCounts


@dataclass(eq=False)
class Item:
    key: int
    candidate: bool = True


def heap_of(*items: Item) -> LazyHeap[Item]:
    heap: LazyHeap[Item] = LazyHeap(lambda item: (item.key,), lambda item: item.candidate)
    for item in items:
        heap.push(item)
    return heap


def test_outdated_entries_do_not_pile_up() -> None:
    items = [Item(n) for n in range(10)]
    heap = heap_of(*items)
    for n in range(1000):
        items[n % 10].key = n
        heap.push(items[n % 10])
    assert len(heap._heap) <= 64 and len(heap._tickets) == 10
    assert [heap.pop().key for _ in items] == list(range(990, 1000))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50), st.booleans()), max_size=150))
def test_pops_as_a_sorted_list_would(changes: list[tuple[int, int, bool]]) -> None:
    items = [Item(100 + n, candidate=False) for n in range(10)]
    heap = heap_of()
    for which, key, candidate in changes:
        items[which].key, items[which].candidate = key, candidate
        if candidate:
            heap.push(items[which])
    left = [item for item in items if item.candidate]
    assert heap.covers(left)
    assert [heap.pop().key for _ in left] == sorted(item.key for item in left)


# a multiset of steps --------------------------------------------------------------------------------------------------


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


def test_outdated_steps_do_not_pile_up() -> None:
    steps = StepCounts()
    steps.add(0)
    for _ in range(1000):
        steps.add(5)
        steps.remove(5)
    assert len(steps._heap) < 20 and steps.least == 0
