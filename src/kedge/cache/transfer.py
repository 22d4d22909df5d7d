"""Copies between the tiers: what is queued, what is under way, and how it ended.

The cache never copies. It hands a `Copy` to a `Copier` and learns of its end by `drain`; between the two calls the
target blocks belong to the transfer, and its nodes are locked. Only what has not been handed over can be cancelled.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kedge.cache.node import Node
from kedge.errors import ConfigError, PlanError


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
    """A prefetch that somebody had to wait for."""
    WASTED = "wasted"
    """Nobody hit what it brought: it was evicted before, or computed anew meanwhile."""
    CANCELLED = "cancelled"
    """It never started."""
    FAILED = "failed"
    """The copier said so."""


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
        """Starts a copy. Returns at once and does not raise: what cannot be done ends as not `ok`."""

    def hurry(self, copy_id: int) -> None:
        """Somebody waits for this copy: it goes before all that nobody waits for, also before what has begun, as far
        as the copier can. Unknown ids are ignored: the copy may just have ended.
        """

    def drain(self) -> list[Copied]:
        """What has ended since the last call. Does not wait."""


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """How much may be under way in each direction. A single transfer may always be, however large it is."""

    jobs: int = 2
    bytes: int = 256 << 20

    def __post_init__(self) -> None:
        for name in ("jobs", "bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "at least one must be allowed under way")


@dataclass(eq=False, slots=True)
class Transfer:
    """One copy with what the cache knows of it. `nodes` go down one path; a split of one of them adds another."""

    copy: Copy
    purpose: Purpose
    nodes: list[Node]
    started: bool = False
    demanded: bool = False
    """A request waits for it, or did before it landed."""
    live: int = 0
    """Nodes that it brought to the device and that are there unhit."""
    outcome: Outcome | None = None

    @property
    def end(self) -> Node:
        """The lowest of its nodes: the one that it locks."""
        return self.nodes[-1]

    @property
    def blocks(self) -> int:
        return len(self.copy.sources)

    @property
    def is_load(self) -> bool:
        return self.copy.direction is Direction.LOAD

    def shares(self) -> Iterator[tuple[Node, list[int]]]:
        """Its nodes with the target blocks of each."""
        at = 0
        for node in self.nodes:
            yield node, list(self.copy.targets[at : at + node.size])
            at += node.size


class TransferQueue:
    """Hands transfers to the copier within the limits: demands first, then in the order in which they came.

    What nobody waits for keeps nobody waiting: for a demand the limits count other demands only.
    """

    def __init__(self, copier: Copier | None, limits: TransferLimits, block_bytes: int) -> None:
        self._copier, self._limits, self._block_bytes = copier, limits, block_bytes
        self._queued: dict[Direction, deque[Transfer]] = {direction: deque() for direction in Direction}
        self._started: dict[int, Transfer] = {}
        self._ids = itertools.count()

    def enqueue(
        self, direction: Direction, purpose: Purpose, nodes: list[Node], sources: list[int], targets: list[int]
    ) -> Transfer:
        """A new transfer; it starts with one of the next calls of `start`."""
        copy = Copy(next(self._ids), direction, tuple(sources), tuple(targets))
        transfer = Transfer(copy, purpose, nodes, demanded=purpose is Purpose.DEMAND)
        self._put(transfer)
        return transfer

    def promote(self, transfer: Transfer) -> None:
        """Somebody waits for `transfer`: it goes before all that nobody waits for."""
        if transfer.demanded:
            return
        transfer.demanded = True
        if transfer.started:
            self._hurry(transfer)
        else:
            self._lane(transfer).remove(transfer)
            self._put(transfer)

    def cancel(self, transfer: Transfer) -> None:
        """Takes a queued transfer out. Raises `PlanError` if it has started: its blocks are being written."""
        if transfer.started:
            raise PlanError("transfer", transfer.copy, "has started and cannot be cancelled")
        self._lane(transfer).remove(transfer)

    def start(self) -> None:
        """Hands over what the limits allow."""
        for queued in self._queued.values():
            while queued and self._fits(queued[0]):
                self._submit(queued.popleft())

    def drain(self) -> list[tuple[Transfer, Copied]]:
        """What has ended. Raises `PlanError` for a copy that was not under way."""
        return [(self._end(copied), copied) for copied in self._copier.drain()] if self._copier else []

    def queued(self, direction: Direction) -> list[Transfer]:
        """What has not started, next first."""
        return list(self._queued[direction])

    def started(self) -> list[Transfer]:
        """What is under way."""
        return list(self._started.values())

    def demanded_blocks(self, direction: Direction) -> int:
        """Blocks that somebody waits for: a new demand comes after these, and before all others."""
        pending = (transfer for transfer in self.pending() if transfer.copy.direction is direction)
        return sum(transfer.blocks for transfer in pending if transfer.demanded)

    def pending(self) -> list[Transfer]:
        """All that has not ended."""
        return [*self._started.values(), *itertools.chain.from_iterable(self._queued.values())]

    def _put(self, transfer: Transfer) -> None:
        queued = self._lane(transfer)
        at = sum(other.demanded for other in queued) if transfer.demanded else len(queued)
        queued.insert(at, transfer)

    def _lane(self, transfer: Transfer) -> deque[Transfer]:
        return self._queued[transfer.copy.direction]

    def _fits(self, transfer: Transfer) -> bool:
        lane = (one for one in self._started.values() if one.copy.direction is transfer.copy.direction)
        ahead = [one.blocks for one in lane if one.demanded or not transfer.demanded]
        total = (sum(ahead) + transfer.blocks) * self._block_bytes
        return not ahead or (len(ahead) < self._limits.jobs and total <= self._limits.bytes)

    def _submit(self, transfer: Transfer) -> None:
        assert self._copier is not None
        transfer.started = True
        self._started[transfer.copy.copy_id] = transfer
        self._copier.submit(transfer.copy)
        if transfer.demanded:
            self._hurry(transfer)

    def _hurry(self, transfer: Transfer) -> None:
        assert self._copier is not None
        self._copier.hurry(transfer.copy.copy_id)

    def _end(self, copied: Copied) -> Transfer:
        transfer = self._started.pop(copied.copy_id, None)
        if transfer is None:
            raise PlanError("copy_id", copied.copy_id, "is not under way")
        return transfer
