"""A dictionary with a bounded number of entries, in the order of their last use."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable
from itertools import islice
from typing import Any, TypeVar

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
    the most entries, so that none pushes out those of others: a 256th at once, as all owners are looked at.
    """

    def __init__(
        self,
        limit: int = ENTRIES,
        on_evicted: Callable[[K, V], None] = lambda _key, _value: None,
        owner: Callable[[K], Hashable] | None = None,
    ) -> None:
        super().__init__()
        self._limit, self._on_evicted, self._owner = limit, on_evicted, owner
        self._owned: dict[Hashable, OrderedDict[K, None]] = {}
        """The keys of each owner, where there are any; owners and keys in the order of their last use"""

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._limit:
            owned = max(self._owned.values(), key=len) if self._owner else [next(iter(self))]
            for gone in [*islice(owned, 1 + min(self._limit // 256, (len(owned) - 1) // 2))]:
                self._on_evicted(gone, self.pop(gone))

    def move_to_end(self, key: K, last: bool = True) -> None:
        super().move_to_end(key, last)
        if self._owner:
            owned = self._owned.pop(owner := self._owner(key), OrderedDict())
            self._owned[owner] = owned
            owned[key] = None
            owned.move_to_end(key, last)

    def __delitem__(self, key: K) -> None:
        super().__delitem__(key)
        if self._owner:
            del self._owned[owner := self._owner(key)][key]
            if not self._owned[owner]:
                del self._owned[owner]

    def pop(self, key: K, *default: Any) -> Any:
        if key not in self and default:
            return default[0]
        value = self[key]
        del self[key]
        return value

    def popitem(self, last: bool = True) -> tuple[K, V]:
        key = next(reversed(self) if last else iter(self))
        return key, self.pop(key)

    def clear(self) -> None:
        super().clear()
        self._owned.clear()

    def use(self, key: K, make: Callable[[], V]) -> V:
        """Return the entry of `key` as the newest, made where there is none."""
        if key in self:
            self.move_to_end(key)
        else:
            self[key] = make()
        return self[key]
