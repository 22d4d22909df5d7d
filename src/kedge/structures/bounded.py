"""A dictionary with a bounded number of entries, in the order of their last use."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable
from itertools import islice
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")
ENTRIES = 1024
"""Entries where only memory bounds how much is remembered, and nothing was measured"""


def of_largest(entries: Collection[T], owner: Callable[[T], Hashable]) -> T:
    """Return the first entry of the owner that has the most: where one has to go, no owner pushes out another's."""
    [(largest, _)] = Counter(map(owner, entries)).most_common(1)
    return next(one for one in entries if owner(one) == largest)


class BoundedDict(OrderedDict[K, V]):
    """The `limit` entries that were used last, least recently used first.

    `use` and assignment make an entry the newest; other look-ups leave the order as it is. `on_evicted` is called with
    every key and value that goes for want of room. With `owner`, a function of keys, they are of the owner that has
    the most entries, so that none pushes out those of others: a 256th at once, as all are looked at to find it, but
    not the newer half of what it has.
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
            gone, owner = [next(iter(self))], self._owner
            if owner is not None:
                [(largest, held)] = Counter(map(owner, self)).most_common(1)
                its = (one for one in self if owner(one) == largest)
                gone = list(islice(its, 1 + min(self._limit // 256, (held - 1) // 2)))
            for key in gone:
                self._on_evicted(key, self.pop(key))

    def use(self, key: K, make: Callable[[], V]) -> V:
        """Return the entry of `key` as the newest, made where there is none."""
        if key in self:
            self.move_to_end(key)
        else:
            self[key] = make()
        return self[key]
