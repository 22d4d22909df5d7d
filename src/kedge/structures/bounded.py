"""A dictionary with a bounded number of entries, in the order of their last use."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")
ENTRIES = 1024
"""Entries where only memory bounds how much is remembered, and nothing was measured"""


def of_largest(entries: Collection[T], owner: Callable[[T], Hashable]) -> T:
    """Return the first entry of the owner that has the most: where one has to go, no owner pushes out another's."""
    held = Counter(map(owner, entries))
    return max(entries, key=lambda one: held[owner(one)])


class BoundedDict(OrderedDict[K, V]):
    """The `limit` entries that were used last, least recently used first.

    `use` and assignment make an entry the newest; other look-ups leave the order as it is. `on_evicted` is called with
    every key and value that goes for want of room. With `owner`, a function of keys, it is one of the owner that has
    the most entries, so that none pushes out those of others.
    """

    def __init__(
        self,
        limit: int = ENTRIES,
        on_evicted: Callable[[K, V], None] = lambda _key, _value: None,
        owner: Callable[[K], Hashable] | None = None,
    ) -> None:
        super().__init__()
        self._limit, self._on_evicted, self._owner = limit, on_evicted, owner

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._limit:
            key = of_largest(self, self._owner) if self._owner else next(iter(self))
            self._on_evicted(key, self.pop(key))

    def use(self, key: K, make: Callable[[], V]) -> V:
        """Return the entry of `key` as the newest, made where there is none."""
        if key in self:
            self.move_to_end(key)
        else:
            self[key] = make()
        return self[key]
