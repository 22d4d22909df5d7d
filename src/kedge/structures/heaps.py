"""Heaps whose entries change: outdated ones stay until they surface, or until they are most of the heap."""

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

Key = tuple[float, ...]
Item = TypeVar("Item", bound=Hashable)


class LazyHeap(Generic[Item]):
    """Candidates by ascending key, logarithmic in their number.

    Push an item again when it becomes a candidate or its key falls: only its newest entry counts, by its ticket. Where
    its key has grown, it is entered anew when it surfaces.
    """

    def __init__(self, key: Callable[[Item], Key], is_candidate: Callable[[Item], bool]) -> None:
        self._key, self._is_candidate = key, is_candidate
        self._numbers = itertools.count(1)
        self._tickets: dict[Item, int] = {}
        self._heap: list[tuple[Key, int, Item]] = []
        self._limit = 64

    def push(self, item: Item) -> None:
        """Enter `item` under its present key."""
        ticket = self._tickets[item] = next(self._numbers)
        heappush(self._heap, (self._key(item), ticket, item))
        if len(self._heap) > self._limit:
            self._drop_outdated()

    def peek(self) -> Item | None:
        """Return the candidate with the least key, which stays; None if there is none."""
        while self._heap:
            key, ticket, item = self._heap[0]
            if not self._is_current(self._heap[0]):
                heappop(self._heap)
            elif (present := self._key(item)) != key:
                heapreplace(self._heap, (present, ticket, item))
            else:
                return item
        return None

    def pop(self) -> Item | None:
        """Remove and return the candidate with the least key; None if there is none."""
        item = self.peek()
        if item is not None:
            heappop(self._heap)
            del self._tickets[item]
        return item

    def covers(self, items: Iterable[Item]) -> bool:
        """Return whether exactly `items` would be popped, in the order of the keys that they have now."""
        current = {entry[2]: entry[0] for entry in self._heap if self._is_current(entry)}
        return current.keys() == set(items) and all(key <= self._key(item) for item, key in current.items())

    def _is_current(self, entry: tuple[Key, int, Item]) -> bool:
        _, ticket, item = entry
        return self._tickets.get(item) == ticket and self._is_candidate(item)

    def _drop_outdated(self) -> None:
        self._heap = list(filter(self._is_current, self._heap))
        heapify(self._heap)
        self._tickets = {item: ticket for _, ticket, item in self._heap}
        self._limit = max(64, 2 * len(self._heap))


class StepCounts:
    """A multiset of steps-to-execution with its least in O(1): a node's own labels and its children's priorities.

    Adding and removing cost by the logarithm of the different steps, however many children there are.
    """

    __slots__ = ("_heap", "counts")

    def __init__(self) -> None:
        self.counts: Counter[float] = Counter()
        """How often each step is in it"""
        self._heap: list[float] = []

    @property
    def least(self) -> float | None:
        """The least step, or None where there is none."""
        heap = self._heap
        while heap and heap[0] not in self.counts:
            heappop(heap)
        return heap[0] if heap else None

    def add(self, step: float) -> None:
        self.counts[step] += 1
        if self.counts[step] == 1:
            heappush(self._heap, step)
            self._drop_outdated()

    def remove(self, step: float) -> None:
        """Remove one `step`, which must be there."""
        self.counts[step] -= 1
        if not self.counts[step]:
            del self.counts[step]

    def _drop_outdated(self) -> None:
        if len(self._heap) > 2 * len(self.counts) + 8:
            self._heap = list(self.counts)
            heapify(self._heap)
