"""A multiset of steps-to-execution with its least in O(1): a node's own labels and its children's priorities."""

from __future__ import annotations

from collections import Counter
from heapq import heapify, heappop, heappush


class StepCounts:
    """Adding and removing cost by the logarithm of the different steps, however many children there are.

    A heap whose outdated entries are dropped when they surface, or when they are most of it.
    """

    __slots__ = ("_counts", "_heap")

    def __init__(self) -> None:
        self._counts: dict[float, int] = {}
        self._heap: list[float] = []

    @property
    def least(self) -> float | None:
        """The least step, or None where there is none."""
        heap = self._heap
        while heap and heap[0] not in self._counts:
            heappop(heap)
        return heap[0] if heap else None

    @property
    def counts(self) -> Counter[float]:
        """How often each step is in it; a copy."""
        return Counter(self._counts)

    def add(self, step: float) -> None:
        count = self._counts[step] = self._counts.get(step, 0) + 1
        if count == 1:
            heappush(self._heap, step)
            self._drop_outdated()

    def remove(self, step: float) -> None:
        """Remove one `step`, which must be there."""
        count = self._counts[step] - 1
        if count:
            self._counts[step] = count
        else:
            del self._counts[step]

    def _drop_outdated(self) -> None:
        if len(self._heap) > 2 * len(self._counts) + 8:
            self._heap = list(self._counts)
            heapify(self._heap)
