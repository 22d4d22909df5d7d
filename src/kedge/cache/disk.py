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
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kedge.cache.copies import BlockFiles, FileDone, FileRead, FileWrite
from kedge.cache.counters import Reason
from kedge.cache.node import HOST, TreeNode
from kedge.cache.radix_tree import RadixTree
from kedge.cache.stored_runs import RunPart, StoredRun, StoredRuns
from kedge.cache.tier_pools import TierPools
from kedge.errors import ConfigError, OutOfBlocks, PlanError
from kedge.policies.prefetch import CostModel
from kedge.settings import TierSettings
from kedge.types import Namespace, RequestId, TenantId


def insert_host(tree: RadixTree, namespace: Namespace, key: bytes, first: int, blocks: Sequence[int]) -> list[int]:
    """Let the host hold `key` from block `first` on, in `blocks`. Returns those that are not needed: the host has had
    them since, or lacks what comes before them.
    """
    if not blocks:
        return []
    walk = tree.index.walk(tree.index.root(namespace), key, None)
    node = tree.index.ending(walk)
    known, spare = _place_on_path(tree, node, first, blocks)
    rest = list(blocks[max(known - first, 0) :])
    if rest and first <= known == walk.length // tree.index.block_bytes:
        node = tree.index.attach(node, key[walk.length :], len(rest))
        tree.place(node, HOST, rest)
    else:
        spare += rest
    tree.touch(node)
    tree.index.drop_if_empty(node)
    return spare


def _place_on_path(tree: RadixTree, node: TreeNode, first: int, blocks: Sequence[int]) -> tuple[int, list[int]]:
    """Give the nodes down to `node` what the host lacks of them. Returns how many blocks of the path the host holds
    now, and those that it held before.
    """
    at, spare = 0, []
    for step in node.path_down():
        mine = list(blocks[max(at - first, 0) : max(at + step.size - first, 0)])
        if step.blocks[HOST]:
            spare += mine
        elif len(mine) < step.size or step.transfer:
            break
        else:
            tree.place(step, HOST, mine)
        at += step.size
    return at, spare


MAX_WRITES = 64
"""Files to be written that may be queued or under way."""
MAX_FILE_BYTES = 64 << 20
"""KV in one file; a single block may be more."""


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """How much the disk tier may hold."""

    max_blocks: int
    file_blocks: int
    """Blocks of one file at most"""

    @classmethod
    def of(cls, settings: TierSettings, block_bytes: int) -> DiskLimits:
        """Return the limits of these settings. Raises `ConfigError` for a disk that does not hold a single block."""
        blocks = settings.disk_memory // block_bytes
        if not blocks:
            why = f"too small: a block has {block_bytes} bytes"
            raise ConfigError(f"{settings.section}.disk_memory", settings.disk_memory, why)
        return cls(blocks, max(1, MAX_FILE_BYTES // block_bytes))


@dataclass(slots=True)
class DiskCounts:
    """What the disk tier did since its start, in blocks."""

    written: int = 0
    read: int = 0
    evicted: int = 0
    skipped: int = 0
    """Not written, as the disk was behind, had failed or had no room"""
    failed: int = 0
    """Not read, as there was no room on the host, or a file was gone or could not be read"""
    corrupt: int = 0
    """Not read, as a file was damaged"""
    seconds: float = 0.0
    """Total seconds of reading"""


class DiskWrites:
    """Writes what is backed up, and deletes what has no room any more. Owned by the cache's thread."""

    def __init__(self, tree: RadixTree, files: BlockFiles, limits: DiskLimits, counts: DiskCounts) -> None:
        self._tree, self._files, self._limits, self._counts = tree, files, limits, counts
        self.runs = StoredRuns(tree.index.block_bytes)
        self._under_way = 0
        self._writes: dict[str, FileWrite] = {}
        """Of runs whose file is not whole yet: one that was removed and added again has another write"""

    @property
    def busy(self) -> bool:
        """Whether something is being written, or is going to be."""
        return self._under_way > 0

    def recover(self) -> None:
        """Take in what is stored. What does not follow another run any more is deleted."""
        stored = self._files.stored()
        by_name = {one.name: one for one in stored}
        for one in stored:
            chain = [one]
            while (parent := by_name.get(chain[-1].parent)) and not self.runs.get(chain[-1].parent):
                chain.append(parent)
            for step in reversed(chain):
                self._take_in(step)
        for one in stored:
            if run := self.runs.get(one.name):
                self.runs.touch(run)
            else:
                self._files.delete([one.name])
        self._make_room(0)

    def _take_in(self, one: FileWrite) -> None:
        parent = self.runs.get(one.parent)
        if self.runs.get(one.name) or (one.parent and parent is None):
            return
        after = RunPart(parent, 0, one.used) if parent else None
        self.runs.add(one.namespace, after, one.key, whole=True)

    def store(self, node: TreeNode) -> None:
        """Order the writing of what the disk lacks of the path to `node`, as far as the host holds it."""
        held = [step for step in node.path_down() if step.blocks[HOST]]
        if not held:
            return
        key, blocks = held[-1].prefix(), [block for step in held for block in step.blocks[HOST]]
        parts = self.runs.find(node.namespace, key, whole=False)
        if parts:
            self.runs.touch(parts[-1].run)
        after = parts[-1] if parts else None
        first = sum(part.count for part in parts)
        size = self._tree.index.block_bytes
        for start in range(first, len(blocks), self._limits.file_blocks):
            stop = min(start + self._limits.file_blocks, len(blocks))
            if self._under_way >= MAX_WRITES or not self._make_room(stop - start, after.run if after else None):
                self._counts.skipped += len(blocks) - start
                return
            run = self.runs.add(node.namespace, after, key[start * size : stop * size])
            self._write(run, tuple(blocks[start:stop]))
            after = RunPart(run, 0, run.size)

    def _write(self, run: StoredRun, blocks: tuple[int, ...]) -> None:
        assert run.parent is not None
        self._under_way += 1
        order = FileWrite(run.name, run.parent.name, run.used, run.namespace, run.key, blocks)
        self._writes[run.name] = order
        self._files.write(order)

    def _make_room(self, blocks: int, keep: StoredRun | None = None) -> bool:
        """Remove what was used longest ago, but for `keep`, until so many more blocks fit. Returns whether they do."""
        while self.runs.blocks + blocks > self._limits.max_blocks:
            run = self.runs.oldest(keep)
            if run is None:
                return False
            self._counts.evicted += run.size
            self.delete(run)
        return True

    def delete(self, run: StoredRun) -> None:
        """Delete a run and all that follow it."""
        gone = [one.name for one in self.runs.remove(run)]
        for name in gone:
            self._writes.pop(name, None)
        self._files.delete(gone)

    def on_written(self, order: FileWrite, done: FileDone) -> None:
        """Take the end of a write."""
        self._under_way -= 1
        run = self.runs.get(order.name)
        if run is None or self._writes.get(order.name) is not order:
            return
        del self._writes[order.name]
        if done.blocks:
            run.is_whole = True
            self._counts.written += run.size
        else:
            self._counts.skipped += run.size
            self.delete(run)

    def check_integrity(self, reading: Iterable[StoredRun]) -> None:
        """Raise `PlanError` unless runs and sizes agree, and the runs count the reads under way, `reading`."""
        self.runs.check_integrity(reading)
        if self.runs.blocks > self._limits.max_blocks:
            raise PlanError("disk blocks", self.runs.blocks, f"at most {self._limits.max_blocks} may be stored")
        if {run.name for run in self.runs if not run.is_whole} != self._writes.keys():
            raise PlanError("writes", list(self._writes), "are not those of the runs without a file")


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
