"""What translating a placeholder's values spares: the share of their tokens that need not be computed all the same."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kedge.reuse.contracts import PoolKey
from kedge.types import Tokens

MAX_PLACEHOLDERS = 1024
FORGET = 0.95
"""What the weight of a translation is multiplied by at every later one of the same placeholder"""
TRIED = 16
"""One value in so many is taken to be spared whole, so that what no longer paid is noticed when it does"""


@dataclass(slots=True)
class _Sums:
    tokens: float = 0.0
    spared: float = 0.0


class Savings:
    """Averages, by placeholder, over what was translated lately. Bounded."""

    def __init__(self) -> None:
        self._sums: OrderedDict[PoolKey, _Sums] = OrderedDict()

    def observe(self, placeholder: PoolKey, tokens: int, spared: int) -> None:
        """Take in that of a value of `tokens` tokens so many need not be computed once it is translated."""
        sums = self._sums.setdefault(placeholder, _Sums())
        self._sums.move_to_end(placeholder)
        if len(self._sums) > MAX_PLACEHOLDERS:
            self._sums.popitem(last=False)
        sums.tokens, sums.spared = FORGET * sums.tokens + tokens, FORGET * sums.spared + spared

    def expected(self, placeholder: PoolKey, value: Tokens) -> float:
        """Return how many of a value's tokens translating it is expected to spare; all of them while nothing is known,
        and for one value in `TRIED`, the same one for all its readers.
        """
        sums = self._sums.get(placeholder)
        if sums is None or not sums.tokens or hash(value) % TRIED == 0:
            return len(value)
        return len(value) * sums.spared / sums.tokens
