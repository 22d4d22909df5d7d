"""What sequences begin with in common."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import TypeVar

T = TypeVar("T")
Packed = TypeVar("Packed", bytes, "array[int]")


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
