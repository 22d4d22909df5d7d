"""Tokens as bytes, so that they are compared and searched at the speed of memory."""

from array import array
from collections.abc import Iterable, Sequence

from kedge.structures.bounded import ENTRIES
from kedge.structures.prefixes import common_length, leading_count

WIDTH = array("i").itemsize
"""Bytes of a token"""


def pack(tokens: Iterable[int]) -> bytes:
    """Return tokens as bytes."""
    return array("i", tokens).tobytes()


def unpack(data: bytes) -> tuple[int, ...]:
    """Return the tokens that were packed."""
    return tuple(array("i", data))


def cut(data: bytes, start: int, stop: int) -> bytes:
    """Return the tokens [start, stop) of packed ones."""
    return data[start * WIDTH : stop * WIDTH]


def size(data: bytes) -> int:
    """Return the number of packed tokens."""
    return len(data) // WIDTH


def find(data: bytes, wanted: bytes, start: int = 0) -> int:
    """Return where `wanted` begins first from token `start` on; -1 where it does not occur, or, in data that was made
    for that, after `ENTRIES` places in the middle of tokens.
    """
    at = data.find(wanted, start * WIDTH)
    for _ in range(ENTRIES):
        if at < 0 or at % WIDTH == 0:
            return at // WIDTH
        at = data.find(wanted, at + 1)
    return -1


def common_head(texts: Sequence[bytes]) -> int:
    """Return how many tokens all of `texts` begin with."""
    first, last = min(texts), max(texts)
    return common_length(first, last) // WIDTH


def common_tail(texts: Sequence[bytes]) -> int:
    """Return how many tokens all of `texts` end with."""
    shortest = min(map(size, texts))
    return leading_count(lambda at: len({text[len(text) - (at + 1) * WIDTH :] for text in texts}) == 1, shortest)
