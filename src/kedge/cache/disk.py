"""The disk behind the host tier: what is backed up is written to files, and comes back when a request asks for it.

The tree knows two tiers only. What is on disk alone is looked up when a request arrives; it enters the tree as what the
host holds once it has been read, and is loaded from there like anything else.

| host blocks | owner                            |
|-------------|----------------------------------|
| of a write  | the tree, which may evict them   |
| of a read   | the read, until it lands         |
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kedge.cache.copies import BlockFiles, FileDone, FileRead, FileWrite
from kedge.cache.counters import Reason
from kedge.cache.disk_writes import DiskCounts, DiskLimits, DiskWrites
from kedge.cache.host_insert import insert_host
from kedge.cache.node import HOST, TreeNode
from kedge.cache.stored_runs import RunPart
from kedge.cache.tier_pools import TierPools
from kedge.errors import OutOfBlocks
from kedge.policies.cost import CostModel
from kedge.types import Namespace, RequestId, TenantId

MAX_READS = 32
"""Prompts to be read that may be queued or under way."""
MAX_TRIES = 3
"""Reads that one request waits for, its own or others'."""


@dataclass(eq=False, slots=True)
class DiskRead:
    """A read under way: the blocks of `key` from block `first` on, into host blocks that belong to it."""

    order: FileRead
    namespace: Namespace
    key: bytes
    first: int
    parts: list[RunPart]
    is_wanted: bool = True
    """False once the namespace was cleared"""


@dataclass(slots=True)
class _Asked:
    """What a waiting request has been told."""

    read: DiskRead | None = None
    tries: int = 0
    over: bool = False


class DiskTier:
    """What is stored on disk, and what moves between there and the host. Owned by the cache's thread."""

    def __init__(
        self, pools: TierPools, cost: CostModel, files: BlockFiles, limits: DiskLimits, host_limits: dict[TenantId, int]
    ) -> None:
        """Begin with what `files` has stored. `host_limits` are the host blocks that a tenant may have."""
        self._pools, self._tree, self._files, self._host_limits = pools, pools.tree, files, host_limits
        self._cost = CostModel()
        self._cost.compute = cost.compute
        self.counts = DiskCounts()
        self.writes = DiskWrites(pools.tree, files, limits, self.counts)
        self._runs = self.writes.runs
        self._reads: dict[int, DiskRead] = {}
        self._asked: dict[RequestId, _Asked] = {}
        self._ids = itertools.count()
        self.writes.recover()

    def must_wait(self, request_id: RequestId, namespace: Namespace, tokens: Sequence[int]) -> bool:
        """Return whether a request waits for KV from the disk; the first call orders the read, where that pays.

        `forget` the request when it no longer waits.
        """
        asked = self._asked.get(request_id)
        if asked is None:
            if not len(self._runs):
                return False
            asked = self._asked[request_id] = _Asked()
        if asked.read and asked.read.order.read_id in self._reads:
            return True
        if not asked.over:
            self._ask(asked, namespace, self._tree.index.pack(tokens))
        return not asked.over

    def forget(self, request_id: RequestId) -> None:
        """Forget a request. What it asked for still comes."""
        self._asked.pop(request_id, None)

    def _ask(self, asked: _Asked, namespace: Namespace, key: bytes) -> None:
        """Join a read that brings more of the prompt, or order one; where there is nothing to wait for, that is it."""
        asked.tries += 1
        known = self._tree.index.find(namespace, key, None)
        length = known.length if known else 0
        parts = self._runs.find(namespace, key)
        asked.read = self._joined(namespace, key, length) or self._order(namespace, key, length, parts)
        asked.over = asked.read is None or asked.tries > MAX_TRIES

    def _joined(self, namespace: Namespace, key: bytes, length: int) -> DiskRead | None:
        """Return the read under way that brings more of `key` than its first `length` bytes."""
        more = key[: length + self._tree.index.block_bytes]
        reads = (one for one in self._reads.values() if one.namespace == namespace and len(more) > length)
        return next((one for one in reads if one.is_wanted and one.key.startswith(more)), None)

    def _order(self, namespace: Namespace, key: bytes, length: int, parts: list[RunPart]) -> DiskRead | None:
        """Order the read of what `parts` hold and the host lacks; None where that is nothing more than is there, or
        would not pay, or finds no room.
        """
        total = sum(part.count for part in parts)
        size = self._tree.index.block_bytes
        if total * size <= length or len(self._reads) >= MAX_READS:
            return None
        self._runs.touch(parts[-1].run)
        known = self._tree.index.find(namespace, key[: total * size], HOST)
        first = known.length // size if known else 0
        blocks = total - length // size
        if not self._cost.load_pays(total - first, blocks * self._tree.block_size, self._queued_blocks()):
            return None
        targets = self._room(namespace, total - first, known.node if known else None)
        if targets is None:
            self.counts.failed += total - first
            return None
        return self._start(namespace, key[: total * size], first, _without(parts, first), targets)

    def _start(
        self, namespace: Namespace, key: bytes, first: int, parts: list[RunPart], targets: list[int]
    ) -> DiskRead:
        files = tuple((part.run.name, part.skip, part.count) for part in parts)
        read = DiskRead(FileRead(next(self._ids), files, tuple(targets)), namespace, key, first, parts)
        for part in parts:
            part.run.readers += 1
        self._reads[read.order.read_id] = read
        self._files.read(read.order)
        return read

    def _room(self, namespace: Namespace, needed: int, above: TreeNode | None) -> list[int] | None:
        """Return host blocks, evicting neither what a request waits for nor what is `above`; None without room."""
        limit = self._host_limits.get(namespace.tenant)
        held = self._tree.shares[HOST].by_tenant[namespace.tenant] + self._reading()[namespace.tenant]
        if limit is not None and held + needed > limit:
            return None
        if above is not None:
            self._tree.lock_path(above)
        try:
            return self._pools.allocate(HOST, needed, Reason.DISK, allowed=lambda victim: not victim.wanted)
        except OutOfBlocks:
            return None
        finally:
            if above is not None:
                self._tree.unlock(above)

    def _reading(self) -> Counter[TenantId]:
        found: Counter[TenantId] = Counter()
        for read in self._reads.values():
            found[read.namespace.tenant] += len(read.order.targets)
        return found

    def _queued_blocks(self) -> int:
        return sum(len(read.order.targets) for read in self._reads.values())

    # ends -----------------------------------------------------------------------------------------------------

    def drain(self) -> bool:
        """Land what has been read, and note what has been written. Returns whether host blocks came free or arrived."""
        ended = False
        for done in self._files.drain():
            if isinstance(done.order, FileWrite):
                self.writes.on_written(done.order, done)
            else:
                self._land(self._reads.pop(done.order.read_id), done)
                ended = True
        return ended

    def _land(self, read: DiskRead, done: FileDone) -> None:
        for part in read.parts:
            part.run.readers -= 1
        targets, arrived = list(read.order.targets), done.blocks if read.is_wanted else 0
        self.counts.read += arrived
        self.counts.seconds += done.seconds
        self._cost.load.observe(done.blocks, done.seconds)
        if done.damaged:
            self._lose(done)
        end = (read.first + arrived) * self._tree.index.block_bytes
        spare = insert_host(self._tree, read.namespace, read.key[:end], read.first, targets[:arrived])
        self._pools[HOST].free([*spare, *targets[arrived:]])

    def _lose(self, done: FileDone) -> None:
        """Forget a file that could not be read, and all that follow it."""
        assert isinstance(done.order, FileRead)
        lost = len(done.order.targets) - done.blocks
        if done.is_damage:
            self.counts.corrupt += lost
        else:
            self.counts.failed += lost
        if run := self._runs.get(done.damaged):
            self.writes.delete(run)

    def clear(self, namespace: Namespace) -> None:
        """Delete all of a namespace. What is being read of it is dropped when it comes."""
        for run in self._runs.first(namespace):
            self.writes.delete(run)
        for read in self._reads.values():
            read.is_wanted = read.is_wanted and read.namespace != namespace

    def namespaces(self) -> list[Namespace]:
        """Return the namespaces of which something is stored."""
        return list(self._runs.namespaces())

    @property
    def reading(self) -> list[int]:
        """Host blocks that belong to reads."""
        return [block for read in self._reads.values() for block in read.order.targets]

    @property
    def is_awaited(self) -> bool:
        """Whether a request waits for a read."""
        return any(asked.read and asked.read.order.read_id in self._reads for asked in self._asked.values())

    def stats(self) -> dict[str, Any]:
        """Return the figures by their names in `CacheStats`."""
        return {"reading_blocks": self._queued_blocks(), "disk_blocks": self._runs.blocks, "disk": asdict(self.counts)}

    def check_integrity(self) -> None:
        """Raise `PlanError` unless runs, readers and sizes agree."""
        self.writes.check_integrity(part.run for read in self._reads.values() for part in read.parts)


def _without(parts: Sequence[RunPart], first: int) -> list[RunPart]:
    """Return `parts` without their first blocks."""
    rest: list[RunPart] = []
    for part in parts:
        skip = min(first, part.count)
        first -= skip
        if skip < part.count:
            rest.append(RunPart(part.run, skip, part.count))
    return rest
