"""Tokens as bytes, so that they are compared and searched at the speed of memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from kedge.structures.prefixes import common_length, leading_count
from kedge.types import Tokens

WIDTH = array("i").itemsize
"""Bytes of a token"""


def pack(tokens: Iterable[int]) -> bytes:
    """Return tokens as bytes."""
    return array("i", tokens).tobytes()


def unpack(data: bytes) -> Tokens:
    """Return the tokens that were packed."""
    return tuple(array("i", data))


def cut(data: bytes, start: int, stop: int) -> bytes:
    """Return the tokens [start, stop) of packed ones."""
    return data[start * WIDTH : stop * WIDTH]


def size(data: bytes) -> int:
    """Return the number of packed tokens."""
    return len(data) // WIDTH


def find(data: bytes, wanted: bytes, start: int = 0) -> int:
    """Return where `wanted` begins first from token `start` on; -1 where it does not occur."""
    at = data.find(wanted, start * WIDTH)
    while at % WIDTH and at >= 0:
        at = data.find(wanted, at + 1)
    return at // WIDTH if at >= 0 else -1


def find_once(data: bytes, wanted: bytes) -> int:
    """Return where `wanted` begins where it occurs exactly once, else -1."""
    at = find(data, wanted)
    return at if at >= 0 and find(data, wanted, at + 1) < 0 else -1


def common_head(texts: Sequence[bytes]) -> int:
    """Return how many tokens all of `texts` begin with."""
    first, last = min(texts), max(texts)
    return common_length(first, last) // WIDTH


def common_tail(texts: Sequence[bytes]) -> int:
    """Return how many tokens all of `texts` end with."""
    shortest = min(map(size, texts))
    return leading_count(lambda at: len({text[len(text) - (at + 1) * WIDTH :] for text in texts}) == 1, shortest)
