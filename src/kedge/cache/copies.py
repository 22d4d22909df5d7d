"""Copies of blocks between the tiers: what each is for, which are under way, and the contract of who carries them out.

The cache never copies. It hands a `Copy` to a `Copier` and learns of its end by `drain`; between the two calls the
target blocks belong to the copy.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
    """Carries out copies, on another thread or stream. All calls come from the thread that owns the cache.

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

    def cancel(self, copy_id: int) -> bool:  # noqa: ARG002
        """Drop a copy that has not begun, which then never ends. Returns whether it was dropped."""
        return False

    def drain(self) -> list[Copied]:
        """Return what has ended since the last call. Does not wait."""


@dataclass(eq=False, slots=True)
class Transfer:
    """One copy with what the cache knows of it."""

    copy: Copy
    purpose: Purpose
    demanded: bool = False
    """A request waits for it, or did before it landed."""
    ends: list[Copied] = field(default_factory=list)
    """Of the ranks that have finished"""
    outcome: Outcome | None = None

    @property
    def blocks(self) -> int:
        """Number of blocks that move."""
        return len(self.copy.sources)

    @property
    def is_load(self) -> bool:
        """Whether it goes from the host to the device."""
        return self.copy.direction is Direction.LOAD

    @property
    def has_failed(self) -> bool:
        """Whether it brings nothing, on one rank at least."""
        return not all(one.ok for one in self.ends)


T = TypeVar("T", bound=Transfer)


class Transfers(Generic[T]):
    """What has been ordered and has not ended."""

    def __init__(self, submit: Callable[[Copy], None], ranks: int = 1) -> None:
        """Hand copies to `submit`. Each is done by so many `ranks`, a share of every block by each."""
        self._submit, self._ranks, self._ids = submit, ranks, itertools.count()
        self._pending: dict[int, T] = {}
        self.cost = CostModel()
        self.counters: Counter[str] = Counter()
        """Since the start, by the names of `CacheStats`"""

    def new_copy(self, purpose: Purpose, sources: Sequence[int], targets: Sequence[int]) -> Copy:
        """Return a copy that has a number of its own."""
        direction = Direction.OFFLOAD if purpose is Purpose.BACKUP else Direction.LOAD
        return Copy(next(self._ids), direction, tuple(sources), tuple(targets))

    def begin(self, transfer: T) -> T:
        """Submit the copy of a transfer."""
        self._pending[transfer.copy.copy_id] = transfer
        self._submit(transfer.copy)
        return transfer

    def drop(self, transfer: T) -> None:
        """Forget a transfer that was taken back."""
        del self._pending[transfer.copy.copy_id]

    def end(self, copied: Copied) -> T | None:
        """Take the end of a copy on one rank. Returns its transfer once all have finished, and counts it. Raises
        `PlanError` for a copy that is not under way.
        """
        transfer = self._pending.get(copied.copy_id)
        if transfer is None:
            raise PlanError("copy_id", copied.copy_id, "is not under way")
        transfer.ends.append(copied)
        if len(transfer.ends) < self._ranks:
            return None
        self.drop(transfer)
        if transfer.has_failed:
            self.counters["failed_copies"] += 1
        elif transfer.is_load:
            self.counters["blocks_loaded"] += transfer.blocks
            self.cost.load.observe(transfer.blocks, max(one.seconds for one in transfer.ends))
        else:
            self.counters["blocks_offloaded"] += transfer.blocks
        return transfer

    def pending(self, direction: Direction | None = None) -> list[T]:
        """Return what has not ended, of one direction or of both, in the order in which it was ordered."""
        return [one for one in self._pending.values() if direction in (None, one.copy.direction)]
