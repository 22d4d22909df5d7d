"""The contract between the cache and the copier of blocks between its tiers.

The cache never copies. It hands a `Copy` to a `Copier` and learns of its end by `drain`; between the two calls the
target blocks belong to the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

CopyBeginning = Callable[[int, int, int], None]
"""(source, target, tokens): copies the KV of the first tokens of a device block to another one, before anything that is
started later writes to either.
"""


class Direction(StrEnum):
    """Which way blocks move."""

    LOAD = "load"
    """Host to device."""
    OFFLOAD = "offload"
    """Device to host."""


class Purpose(StrEnum):
    """Why blocks move. Demands go before prefetches; backups move the other way."""

    DEMAND = "demand"
    PREFETCH = "prefetch"
    BACKUP = "backup"


class Outcome(StrEnum):
    """How a transfer ended."""

    COMPLETED = "completed"
    """It landed; where it was a prefetch, it was hit too."""
    LATE = "late"
    """A prefetch that a request had to wait for."""
    WASTED = "wasted"
    """No request hit what it brought: it was evicted before, or computed anew meanwhile."""
    CANCELLED = "cancelled"
    """It never started."""
    FAILED = "failed"
    """The copier reported a failure."""


@dataclass(frozen=True, slots=True)
class Copy:
    """An order: block `sources[i]` of one tier to block `targets[i]` of the other."""

    copy_id: int
    direction: Direction
    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copied:
    """The end of a copy. From now on nothing of it reads or writes."""

    copy_id: int
    ok: bool
    seconds: float = 0.0
    """How long the copy itself took, without its time in a queue."""


class Copier(Protocol):
    """Carries out copies, on another thread or stream; both methods are called by the thread that owns the cache.

    Every submitted copy ends exactly once, in any order, as `ok` or not. A copy has to come after all work on its
    blocks that was started before `submit` (the passes that wrote its sources, or that still read what its targets
    held before), and before all work started after `drain` has reported it.
    """

    def submit(self, copy: Copy) -> None:
        """Start a copy. Returns at once and does not raise: what cannot be done ends as not `ok`."""

    def hurry(self, copy_id: int) -> None:
        """Put this copy, which a request waits for, before all that no request waits for, even what has begun, as far
        as the copier can. Unknown ids are ignored: the copy may just have ended.
        """

    def drain(self) -> list[Copied]:
        """Return what has ended since the last call. Does not wait."""
