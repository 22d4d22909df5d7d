"""How many agents read a value: what base KV of a new one is going to be worth."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kedge.reuse.contracts import PoolKey
from kedge.types import Tokens

MAX_PLACEHOLDERS = 1024
MAX_VALUES = 256
"""Values of a placeholder whose readers are still being counted; the oldest one's count is final then"""
FORGET = 0.98
"""What the weight of a final count is multiplied by at every later one"""
UNKNOWN = 2.0
"""Readers of a value that are assumed at least while no count is final"""


@dataclass(slots=True)
class _Counts:
    open: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """By the hash of a value: how often it was read; the value that was read longest ago first"""
    most: int = 0
    reads: float = 0.0
    values: float = 0.0


class Readers:
    """Counts, by placeholder, how often its values are read. Bounded."""

    def __init__(self) -> None:
        self._counts: OrderedDict[PoolKey, _Counts] = OrderedDict()

    def read(self, placeholder: PoolKey, value: Tokens) -> None:
        """Count that a request reads this value."""
        counts = self._counts.setdefault(placeholder, _Counts())
        self._counts.move_to_end(placeholder)
        if len(self._counts) > MAX_PLACEHOLDERS:
            self._counts.popitem(last=False)
        name = hash(value)
        counts.open[name] = counts.open.get(name, 0) + 1
        counts.most = max(counts.most, counts.open[name])
        counts.open.move_to_end(name)
        if len(counts.open) > MAX_VALUES:
            _, reads = counts.open.popitem(last=False)
            counts.reads, counts.values = FORGET * counts.reads + reads, FORGET * counts.values + 1

    def expected(self, placeholder: PoolKey) -> float:
        """Return how often a value of this placeholder is read, the first time included: the average of final counts,
        or the highest so far while there are none.
        """
        counts = self._counts.get(placeholder)
        if counts is None or not counts.values:
            return max(UNKNOWN, counts.most if counts else 0)
        return counts.reads / counts.values
