"""The queue of transfers between the tiers: what waits, what is under way, and how it ended.

Until a transfer ends its nodes are locked. Only one that has not been handed to the copier can be cancelled.
"""

from __future__ import annotations

import itertools
from collections import deque

from kedge.cache.copies import Copied, Copier, Copy, Direction, Purpose
from kedge.cache.node import Transfer, TreeNode
from kedge.errors import PlanError
from kedge.settings import TierSettings


class TransferQueue:
    """A queue that hands transfers to the copier within the limits: demands first, then in the order of arrival.

    Speculative transfers never delay demanded ones: for a demand the limits count other demands only.
    """

    def __init__(self, copier: Copier | None, limits: TierSettings, block_bytes: int) -> None:
        self._copier, self._limits, self._block_bytes = copier, limits, block_bytes
        self._queued: dict[Direction, deque[Transfer]] = {direction: deque() for direction in Direction}
        self._started: dict[int, Transfer] = {}
        self._ids = itertools.count()

    def enqueue(
        self, direction: Direction, purpose: Purpose, nodes: list[TreeNode], sources: list[int], targets: list[int]
    ) -> Transfer:
        """Add a transfer of `nodes`. It starts with one of the next calls of `start`."""
        copy = Copy(next(self._ids), direction, tuple(sources), tuple(targets))
        transfer = Transfer(copy, purpose, nodes, demanded=purpose is Purpose.DEMAND)
        for node in nodes:
            node.transfer = transfer
        self._put(transfer)
        return transfer

    def promote(self, transfer: Transfer) -> None:
        """Move `transfer`, which a request waits for now, before all that no request waits for."""
        if transfer.demanded:
            return
        transfer.demanded = True
        if transfer.started:
            self._hurry(transfer)
        else:
            self._lane(transfer).remove(transfer)
            self._put(transfer)

    def cancel(self, transfer: Transfer) -> None:
        """Take a queued transfer out. Raises `PlanError` if it has started: its blocks are being written."""
        if transfer.started:
            raise PlanError("transfer", transfer.copy, "has started and cannot be cancelled")
        self._lane(transfer).remove(transfer)

    def start(self) -> None:
        """Hand over what the limits allow."""
        for queued in self._queued.values():
            while queued and self._fits(queued[0]):
                self._submit(queued.popleft())

    def drain(self) -> list[tuple[Transfer, Copied]]:
        """Return what has ended. Raises `PlanError` for a copy that was not under way."""
        return [(self._end(copied), copied) for copied in self._copier.drain()] if self._copier else []

    def queued(self, direction: Direction) -> list[Transfer]:
        """Return what has not started, next first."""
        return list(self._queued[direction])

    def started(self) -> list[Transfer]:
        """Return what is under way."""
        return list(self._started.values())

    def demanded_blocks(self, direction: Direction) -> int:
        """Return how many blocks requests wait for: a new demand comes after these, and before all others."""
        pending = (transfer for transfer in self.pending() if transfer.copy.direction is direction)
        return sum(transfer.blocks for transfer in pending if transfer.demanded)

    def pending(self) -> list[Transfer]:
        """Return all that has not ended."""
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
        return not ahead or (len(ahead) < self._limits.copy_jobs and total <= self._limits.copy_bytes)

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
