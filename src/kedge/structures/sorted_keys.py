"""A dictionary that knows which of its keys begin most like a given one."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import merge
from typing import TypeVar

from kedge.structures.prefixes import common_length

T = TypeVar("T")


class SortedKeys(dict[bytes, T]):
    """A dictionary of byte strings, whose order is kept from when it is first asked for.

    Items are set and deleted one by one.
    """

    __slots__ = ("_order",)

    def __init__(self) -> None:
        super().__init__()
        self._order: list[bytes] | None = None

    def __setitem__(self, key: bytes, value: T) -> None:
        if self._order is not None and key not in self:
            insort(self._order, key)
        super().__setitem__(key, value)

    def __delitem__(self, key: bytes) -> None:
        super().__delitem__(key)
        if self._order is not None:
            del self._order[bisect_left(self._order, key)]

    @property
    def order(self) -> list[bytes]:
        """The keys, ascending."""
        if self._order is None:
            self._order = sorted(self)
        return self._order

    def nearest(self, key: bytes) -> Iterator[tuple[int, T]]:
        """Iterate over the values whose keys begin as `key` does, each with for how many bytes, the longest first.

        In ascending order these keys are beside the place of `key`, and the farther from it, the less they have in
        common with it: O(log n) for the first, O(1) for each more.
        """
        order = self.order
        place = bisect_left(order, key)
        below = self._along(range(place - 1, -1, -1), key)
        above = self._along(range(place, len(order)), key)
        return merge(below, above, key=lambda found: -found[0])

    def _along(self, places: range, key: bytes) -> Iterator[tuple[int, T]]:
        for place in places:
            other = self.order[place]
            same = common_length(other, key)
            if not same:
                return
            yield same, self[other]
