"""Copies of blocks between the tiers: what each is for, which are under way, and the contract of who carries them out.

The cache never copies. It hands a `Copy` to a `Copier` and learns of its end by `drain`; between the two calls the
target blocks belong to the copy.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from kedge.errors import PlanError
from kedge.policies.prefetch import CostModel

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
    """Carries out copies, on another thread, stream or process; all methods are called by the thread that owns the
    cache.

    Every submitted copy ends exactly once, in any order, as `ok` or not, unless it is cancelled. A copy has to come
    after all work on its blocks that was started before `submit` (the passes that wrote its sources, or that still read
    what its targets held before), and before all work started after `drain` has reported it.
    """

    def submit(self, copy: Copy) -> None:
        """Queue a copy. Returns at once and does not raise: what cannot be done ends as not `ok`."""

    def hurry(self, copy_id: int) -> None:
        """Put this copy, which a request waits for, before all that no request waits for, even what has begun, as far
        as the copier can. Unknown ids are ignored: the copy may just have ended.
        """

    def cancel(self, copy_id: int) -> bool:
        """Drop a copy that has not begun, which then never ends. Returns whether it was dropped."""

    def drain(self) -> list[Copied]:
        """Return what has ended since the last call. Does not wait."""


@dataclass(eq=False, slots=True)
class Transfer:
    """One copy with what the cache knows of it."""

    copy: Copy
    purpose: Purpose
    demanded: bool = False
    """A request waits for it, or did before it landed."""
    outcome: Outcome | None = None

    @property
    def blocks(self) -> int:
        """Number of blocks that move."""
        return len(self.copy.sources)

    @property
    def is_load(self) -> bool:
        """Whether it goes from the host to the device."""
        return self.copy.direction is Direction.LOAD


T = TypeVar("T", bound=Transfer)


class Transfers(Generic[T]):
    """What has been handed to the copier and has not ended."""

    def __init__(self, copier: Copier | None) -> None:
        """Begin with none under way; without a copier there never is."""
        self._copier, self._ids = copier, itertools.count()
        self._pending: dict[int, T] = {}
        self.cost = CostModel()
        self.counted: Counter[str] = Counter()
        """Of what has ended since the start, by the names of `CacheStats`"""

    def new_copy(self, purpose: Purpose, sources: Sequence[int], targets: Sequence[int]) -> Copy:
        """Return a copy that has a number of its own."""
        direction = Direction.OFFLOAD if purpose is Purpose.BACKUP else Direction.LOAD
        return Copy(next(self._ids), direction, tuple(sources), tuple(targets))

    def begin(self, transfer: T) -> T:
        """Hand a transfer to the copier."""
        assert self._copier is not None
        self._pending[transfer.copy.copy_id] = transfer
        self._copier.submit(transfer.copy)
        if transfer.purpose is Purpose.DEMAND:
            self.promote(transfer)
        return transfer

    def promote(self, transfer: T) -> None:
        """Move `transfer`, which a request waits for now, before all that no request waits for."""
        if not transfer.demanded:
            transfer.demanded = True
            assert self._copier is not None
            self._copier.hurry(transfer.copy.copy_id)

    def cancel(self, transfer: T) -> bool:
        """Take a transfer back that has not begun. Returns whether it was."""
        assert self._copier is not None
        is_cancelled = self._copier.cancel(transfer.copy.copy_id)
        if is_cancelled:
            del self._pending[transfer.copy.copy_id]
        return is_cancelled

    def drain(self) -> list[tuple[T, Copied]]:
        """Return what has ended, and count it. Raises `PlanError` for a copy that was not under way."""
        ended = []
        for copied in self._copier.drain() if self._copier else ():
            transfer = self._pending.pop(copied.copy_id, None)
            if transfer is None:
                raise PlanError("copy_id", copied.copy_id, "is not under way")
            if not copied.ok:
                self.counted["failed_copies"] += 1
            elif transfer.is_load:
                self.counted["blocks_loaded"] += transfer.blocks
                self.cost.load.observe(transfer.blocks, copied.seconds)
            else:
                self.counted["blocks_offloaded"] += transfer.blocks
            ended.append((transfer, copied))
        return ended

    def pending(self, direction: Direction | None = None) -> list[T]:
        """Return what has not ended, of one direction or of both, in the order in which it was ordered."""
        return [one for one in self._pending.values() if direction in (None, one.copy.direction)]

    def load_pays(self, blocks: int, tokens: int) -> bool:
        """Return whether loading `blocks`, behind all loads that requests wait for, is faster than computing their
        `tokens`, by what has been measured so far.
        """
        ahead = sum(one.blocks for one in self.pending(Direction.LOAD) if one.demanded)
        return self.cost.load_pays(blocks, tokens, ahead)
