"""A mapping with a bounded number of entries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, ValuesView
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Lru(Generic[K, V]):
    """Keeps the `limit` entries that were used last."""

    def __init__(self, limit: int) -> None:
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._limit = limit

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the entry of `key`, made where there is none."""
        if key not in self._entries:
            self._entries[key] = make()
            if len(self._entries) > self._limit:
                self._entries.popitem(last=False)
        self._entries.move_to_end(key)
        return self._entries[key]

    def values(self) -> ValuesView[V]:
        return self._entries.values()

    def clear(self) -> None:
        self._entries.clear()
