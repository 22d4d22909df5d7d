"""How many agents read a placeholder's values, which is what base KV of a new one is worth."""

from __future__ import annotations

from kedge.reuse.contracts import PoolKey
from kedge.structures.bounded import BoundedDict
from kedge.types import Tokens

MAX_PLACEHOLDERS = 1024
MAX_VALUES = 256
"""Values of a placeholder whose readers are being counted; beyond that, the oldest one's count is final."""
FORGET = 0.98
"""Factor on the weight of a final count at every later one."""
UNKNOWN = 2.0
"""Readers of a value that are assumed at least, while no count is final."""


class _Counts:
    """The reads of one placeholder's values: being counted by the hash of a value, and the average of final counts."""

    def __init__(self) -> None:
        self.open: BoundedDict[int, int] = BoundedDict(MAX_VALUES, self._close)
        self.most = 0
        self.reads = self.values = 0.0

    def read(self, value: int) -> None:
        self.open[value] = self.open.get(value, 0) + 1
        self.most = max(self.most, self.open[value])

    def _close(self, _: int, reads: int) -> None:
        self.reads, self.values = FORGET * self.reads + reads, FORGET * self.values + 1


class Readers:
    """Counts, by placeholder, how often its values are read. Bounded."""

    def __init__(self) -> None:
        self._counts: BoundedDict[PoolKey, _Counts] = BoundedDict(MAX_PLACEHOLDERS)

    def read(self, placeholder: PoolKey, value: Tokens) -> None:
        """Count that a request reads this value."""
        self._counts.use(placeholder, _Counts).read(hash(value))

    def reads(self, placeholder: PoolKey, value: Tokens) -> int:
        """Return how often this value has been read, as far as that is still counted."""
        counts = self._counts.get(placeholder)
        return counts.open.get(hash(value), 0) if counts else 0

    def expected(self, placeholder: PoolKey) -> float:
        """Return how often a value of this placeholder is read, the first time included: the average of final counts,
        or the highest so far while there are none.
        """
        counts = self._counts.get(placeholder)
        if counts is None or not counts.values:
            return max(UNKNOWN, counts.most if counts else 0)
        return counts.reads / counts.values
