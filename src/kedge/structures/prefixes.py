"""What sequences begin with in common, and a dictionary that knows which of its keys begin most like a given one."""

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from itertools import takewhile
from typing import TypeVar

T = TypeVar("T")
Packed = TypeVar("Packed", bytes, "array[int]")


def first_of(items: Sequence[T], length: int) -> Sequence[T]:
    """Return the first items of a sequence: itself where it is no longer."""
    return items if length >= len(items) else items[:length]


def leading_count(holds: Callable[[int], bool], stop: int, start: int = 0, guess: int = -1) -> int:
    """Return up to which index `holds` is true, where it is from `start` on, and false from there to `stop`.

    O(log n) calls, and two where the answer is `guess`.
    """
    low, high, probes = start, stop, [guess, guess - 1]
    while low < high:
        middle = probes.pop() if probes else (low + high) // 2
        if not low <= middle < high:
            continue
        if holds(middle):
            low = middle + 1
        else:
            high = middle
    return low


def common_prefix(sequences: Iterable[Sequence[T]]) -> tuple[T, ...]:
    """Return the longest common prefix of several sequences. O(its length x sequences)."""
    same = takewhile(lambda items: len(set(items)) == 1, zip(*sequences, strict=False))
    return tuple(items[0] for items in same)


def common_length(one: Packed, other: Packed) -> int:
    """Return how many items both begin with. Slices are compared at once, which spares Python's loop: O(n)."""
    same, end = 0, min(len(one), len(other))
    while same < end:
        middle = (same + end + 1) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            end = middle - 1
    return same


def chain_of(tokens: Sequence[Hashable], block_size: int, known: Sequence[Hashable] = ()) -> list[Hashable]:
    """Return the prefix hashes of the full blocks of `tokens`; `known` are those of what they begin with, or more."""
    chain = list(known[: len(tokens) // block_size])
    before = chain[-1] if chain else 0
    rest = iter(tokens[len(chain) * block_size :])
    for block in zip(*[rest] * block_size, strict=False):
        before = hash((before, block))
        chain.append(before)
    return chain


def cached_length(chain: Iterable[Hashable], cached: Container[Hashable]) -> int:
    """Return how many blocks of a chain are cached before the first that is not."""
    return sum(1 for _ in takewhile(cached.__contains__, chain))


class SortedKeys(dict[bytes, T]):
    """A dictionary of byte strings, whose order is kept from when it is first asked for.

    Items are set and deleted one by one.
    """

    _order: list[bytes] | None = None

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

    def nearest(self, key: bytes, most: int) -> list[tuple[int, T]]:
        """Return the values of up to `most` keys, each with for how many bytes it begins as `key` does.

        In ascending order those that begin most like it are beside its place: half are from below it, half from above.
        """
        place = bisect_left(order := self.order, key)
        return [(common_length(one, key), self[one]) for one in order[max(0, place - most // 2) : place + most // 2]]
