"""How much of a value translating it saves: the share of its tokens that need not be computed all the same."""

from __future__ import annotations

from dataclasses import dataclass

from kedge.reuse.contracts import PoolKey
from kedge.structures.bounded import BoundedDict
from kedge.types import Tokens

MAX_PLACEHOLDERS = 1024
FORGET = 0.95
"""Factor on the weight of a translation at every later one of the same placeholder."""
TRIED = 16
"""One value in so many is assumed to be saved whole, so that a placeholder that pays again is noticed."""


@dataclass(slots=True)
class _Sums:
    tokens: float = 0.0
    spared: float = 0.0


class Savings:
    """Averages, by placeholder, over what was translated lately. Bounded."""

    def __init__(self) -> None:
        self._sums: BoundedDict[PoolKey, _Sums] = BoundedDict(MAX_PLACEHOLDERS)

    def observe(self, placeholder: PoolKey, tokens: int, spared: int) -> None:
        """Learn that translating a value of `tokens` tokens saved computing `spared` of them."""
        sums = self._sums.use(placeholder, _Sums)
        sums.tokens, sums.spared = FORGET * sums.tokens + tokens, FORGET * sums.spared + spared

    def expected(self, placeholder: PoolKey, value: Tokens) -> float:
        """Return how many of a value's tokens translating it is expected to save.

        All of them while nothing is known, and for one value in `TRIED`, the same one for all its readers.
        """
        sums = self._sums.get(placeholder)
        if sums is None or not sums.tokens or hash(value) % TRIED == 0:
            return len(value)
        return len(value) * sums.spared / sums.tokens
