"""The disk behind the host tier: what is backed up is written to files, and comes back when a request asks for it.

The tree knows two tiers only. What is on disk alone is looked up when a request arrives; it enters the tree as what the
host holds once it has been read, and is loaded from there like anything else.

| host blocks | owner                            |
|-------------|----------------------------------|
| of a write  | the tree, which may evict them   |
| of a read   | the read, until it lands         |
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kedge.cache.block_pool import TierPools
from kedge.cache.copies import BlockFiles, FileDone, FileRead, FileWrite
from kedge.cache.counters import Reason
from kedge.cache.node import HOST, TreeNode
from kedge.cache.radix_tree import RadixTree
from kedge.errors import ConfigError, OutOfBlocks, PlanError
from kedge.policies.prefetch import CostModel
from kedge.settings import TierSettings
from kedge.structures.prefixes import common_length
from kedge.types import Namespace, RequestId, TenantId


@dataclass(eq=False, slots=True)
class StoredRun:
    """A run of blocks on disk, or (without a parent) the root of a namespace."""

    name: str
    """Digest of everything that it depends on but the model: namespace, and token ids from the first to its last."""
    namespace: Namespace
    parent: StoredRun | None = None
    used: int = 0
    """Blocks of the parent that come before it"""
    key: bytes = b""
    """Token ids as int32 bytes"""
    size: int = 0
    """In blocks"""
    is_whole: bool = False
    """Whether its file has been written"""
    readers: int = 0
    """Reads under way, for which it stays"""
    children: dict[tuple[int, bytes], StoredRun] = field(default_factory=dict)
    """By how much of this run is before them, and the key of their first block"""

    def path(self) -> Iterator[StoredRun]:
        """Iterate over the run and its ancestors, without the root."""
        run: StoredRun = self
        while run.parent is not None:
            yield run
            run = run.parent


@dataclass(frozen=True, slots=True)
class RunPart:
    """The first `count` blocks of a run, of which the first `skip` are left out."""

    run: StoredRun
    skip: int
    count: int


def run_name(parent: str, used: int, namespace: Namespace, key: bytes) -> str:
    """Return the name of a run: a SHA-256 in hexadecimal."""
    head = f"{parent} {used} {len(namespace.tenant)} {namespace.tenant} {namespace.partition}\n"
    return hashlib.sha256(head.encode() + key).hexdigest()


class StoredRuns:
    """Which runs of blocks are stored on disk, found by the exact prefix before them, the least recently used first.

    A run is the content of one file: some full blocks that follow a prefix. It begins after `used` blocks of its parent
    and is used no later than that, so the first is a leaf. What is stored is closed under prefixes. Runs are never
    split or changed.
    """

    def __init__(self, block_key: int) -> None:
        """`block_key` is the length of a block's key in bytes."""
        self._block_key = block_key
        self._roots: dict[Namespace, StoredRun] = {}
        self._runs: OrderedDict[str, StoredRun] = OrderedDict()
        self.blocks = 0

    def __len__(self) -> int:
        return len(self._runs)

    def find(self, namespace: Namespace, key: bytes, *, whole: bool = True) -> list[RunPart]:
        """Return the parts of runs that hold the longest stored prefix of `key`; only of those that have been written
        where `whole`. O(length of the prefix).
        """
        parts: list[RunPart] = []
        run, at, used = self._roots.get(namespace), 0, 0
        while run is not None:
            run = run.children.get((used, key[at : at + self._block_key]))
            if run is None or (whole and not run.is_whole):
                break
            used = common_length(run.key, key[at : at + len(run.key)]) // self._block_key
            parts.append(RunPart(run, 0, used))
            at += used * self._block_key
        return parts

    def add(self, namespace: Namespace, after: RunPart | None, key: bytes, *, whole: bool = False) -> StoredRun:
        """Add a run that follows `after`, or is the first of a prompt. Its first block must not be stored there."""
        parent, used = (
            (after.run, after.count) if after else (self._roots.setdefault(namespace, StoredRun("", namespace)), 0)
        )
        name = run_name(parent.name, used, namespace, key)
        run = StoredRun(name, namespace, parent, used, key, len(key) // self._block_key, whole)
        parent.children[used, key[: self._block_key]] = run
        self._runs[name] = run
        self.blocks += run.size
        self.touch(run)
        return run

    def get(self, name: str) -> StoredRun | None:
        """Return the run of this name."""
        return self._runs.get(name)

    def touch(self, run: StoredRun) -> None:
        """Mark a run and those before it as used now."""
        for step in run.path():
            self._runs.move_to_end(step.name)

    def oldest(self, keep: StoredRun | None) -> StoredRun | None:
        """Return the run that goes first, but for `keep`; None where all are being written or read."""
        free = (run for run in self if run.is_whole and not run.readers and not run.children and run is not keep)
        return next(free, None)

    def remove(self, run: StoredRun) -> list[StoredRun]:
        """Remove a run and all that follow it. Returns what is gone, the last ones first."""
        gone = [run]
        for one in gone:  # it grows meanwhile
            gone += one.children.values()
        for one in gone:
            del self._runs[one.name]
            self.blocks -= one.size
        assert run.parent is not None
        del run.parent.children[run.used, run.key[: self._block_key]]
        if run.parent.parent is None and not run.parent.children:
            self._roots.pop(run.namespace, None)
        return gone[::-1]

    def first(self, namespace: Namespace) -> list[StoredRun]:
        """Return the runs of a namespace that no other run comes before."""
        root = self._roots.get(namespace)
        return list(root.children.values()) if root else []

    def namespaces(self) -> Iterable[Namespace]:
        """Return the namespaces of which something is stored."""
        return list(self._roots)

    def __iter__(self) -> Iterator[StoredRun]:
        return iter(self._runs.values())

    def check_integrity(self, reading: Iterable[StoredRun]) -> None:
        """Raise `PlanError` unless links, names, order and size agree, and each run counts its reads under way."""
        readers = Counter(reading)
        seen: set[StoredRun] = set()
        for run in self:
            parent = run.parent
            assert parent is not None
            name = run_name(parent.name, run.used, run.namespace, run.key)
            linked = parent.children.get((run.used, run.key[: self._block_key])) is run and run.name == name
            if not linked or run.used > parent.size or parent in seen:
                raise PlanError("run", run.name, "is not where it should be, or was used later than what is before it")
            if run.readers != readers[run]:
                raise PlanError("readers", run.readers, f"{readers[run]} reads are under way")
            seen.add(run)
        if self.blocks != sum(run.size for run in self):
            raise PlanError("blocks", self.blocks, "is not the sum over the runs")


def insert_host(tree: RadixTree, namespace: Namespace, key: bytes, first: int, blocks: Sequence[int]) -> list[int]:
    """Let the host hold `key` from block `first` on, in `blocks`. Returns those that are not needed: the host has had
    them since, or lacks what comes before them.
    """
    if not blocks:
        return []
    walk = tree.descend(tree.root(namespace), key, None)
    node = tree.ending(walk)
    known, spare = 0, list[int]()
    for step in node.path_down():
        mine = list(blocks[max(known - first, 0) : max(known + step.size - first, 0)])
        if step.blocks[HOST]:
            spare += mine
        elif len(mine) < step.size or step.transfer:
            break
        else:
            tree.place(step, HOST, mine)
        known += step.size
    rest = list(blocks[max(known - first, 0) :])
    if rest and first <= known == walk.length // tree.block_bytes:
        node = tree.attach(node, key[walk.length :], len(rest))
        tree.place(node, HOST, rest)
    else:
        spare += rest
    tree.touch(node)
    tree.drop_if_empty(node)
    return spare


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
        self._limits, self._runs = limits, StoredRuns(pools.tree.block_bytes)
        self._writes: dict[str, FileWrite] = {}
        """Of runs whose file is not whole yet: one that was removed and added again has another write"""
        self._under_way = 0
        """Writes that have not ended"""
        self._reads: dict[int, DiskRead] = {}
        self._asked: dict[RequestId, _Asked] = {}
        self._ids = itertools.count()
        self._recover()

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
            self._ask(asked, namespace, self._tree.pack(tokens))
        return not asked.over

    def forget(self, request_id: RequestId) -> None:
        """Forget a request. What it asked for still comes."""
        self._asked.pop(request_id, None)

    def _ask(self, asked: _Asked, namespace: Namespace, key: bytes) -> None:
        """Join a read that brings more of the prompt, or order one; where there is nothing to wait for, that is it."""
        asked.tries += 1
        known = self._tree.find(namespace, key, None)
        length = known.length if known else 0
        more = key[: length + self._tree.block_bytes]
        reads = (one for one in self._reads.values() if one.namespace == namespace and len(more) > length)
        joined = next((one for one in reads if one.is_wanted and one.key.startswith(more)), None)
        asked.read = joined or self._order(namespace, key, length, self._runs.find(namespace, key))
        asked.over = asked.read is None or asked.tries > MAX_TRIES

    def _order(self, namespace: Namespace, key: bytes, length: int, parts: list[RunPart]) -> DiskRead | None:
        """Order the read of what `parts` hold and the host lacks; None where that is nothing more than is there, or
        would not pay, or finds no room.
        """
        total = sum(part.count for part in parts)
        size = self._tree.block_bytes
        if total * size <= length or len(self._reads) >= MAX_READS:
            return None
        self._runs.touch(parts[-1].run)
        known = self._tree.find(namespace, key[: total * size], HOST)
        first = known.length // size if known else 0
        blocks = total - length // size
        if not self._cost.load_pays(total - first, blocks * self._tree.block_size, self._queued_blocks()):
            return None
        targets = self._room(namespace, total - first, known.node if known else None)
        if targets is None:
            self.counts.failed += total - first
            return None
        parts = _without(parts, first)
        files = tuple((part.run.name, part.skip, part.count) for part in parts)
        read = DiskRead(FileRead(next(self._ids), files, tuple(targets)), namespace, key[: total * size], first, parts)
        for part in parts:
            part.run.readers += 1
        self._reads[read.order.read_id] = read
        self._files.read(read.order)
        return read

    def _room(self, namespace: Namespace, needed: int, above: TreeNode | None) -> list[int] | None:
        """Return host blocks, evicting neither what a request waits for nor what is `above`; None without room."""
        limit = self._host_limits.get(namespace.tenant)
        own = (read for read in self._reads.values() if read.namespace.tenant == namespace.tenant)
        reading = sum(len(read.order.targets) for read in own)
        held = self._tree.shares[HOST].by_tenant[namespace.tenant] + reading
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

    def _queued_blocks(self) -> int:
        return sum(len(read.order.targets) for read in self._reads.values())

    # writes ---------------------------------------------------------------------------------------------------

    @property
    def writing(self) -> bool:
        """Whether something is being written, or is going to be."""
        return self._under_way > 0

    def _recover(self) -> None:
        """Take in what is stored. What does not follow another run any more is deleted."""
        stored = self._files.stored()
        by_name = {one.name: one for one in stored}
        for one in stored:
            chain = [one]
            while (parent := by_name.get(chain[-1].parent)) and not self._runs.get(chain[-1].parent):
                chain.append(parent)
            for step in reversed(chain):
                parent_run = self._runs.get(step.parent)
                if not self._runs.get(step.name) and (parent_run or not step.parent):
                    after = RunPart(parent_run, 0, step.used) if parent_run else None
                    self._runs.add(step.namespace, after, step.key, whole=True)
        for one in stored:
            if run := self._runs.get(one.name):
                self._runs.touch(run)
            else:
                self._files.delete([one.name])
        self._make_room(0)

    def store(self, node: TreeNode) -> None:
        """Order the writing of what the disk lacks of the path to `node`, as far as the host holds it."""
        held = [step for step in node.path_down() if step.blocks[HOST]]
        if not held:
            return
        key, blocks = held[-1].prefix(), [block for step in held for block in step.blocks[HOST]]
        parts = self._runs.find(node.namespace, key, whole=False)
        if parts:
            self._runs.touch(parts[-1].run)
        after = parts[-1] if parts else None
        first = sum(part.count for part in parts)
        size = self._tree.block_bytes
        for start in range(first, len(blocks), self._limits.file_blocks):
            stop = min(start + self._limits.file_blocks, len(blocks))
            if self._under_way >= MAX_WRITES or not self._make_room(stop - start, after.run if after else None):
                self.counts.skipped += len(blocks) - start
                return
            run = self._runs.add(node.namespace, after, key[start * size : stop * size])
            assert run.parent is not None
            self._under_way += 1
            written = tuple(blocks[start:stop])
            order = FileWrite(run.name, run.parent.name, run.used, run.namespace, run.key, written)
            self._writes[run.name] = order
            self._files.write(order)
            after = RunPart(run, 0, run.size)

    def _make_room(self, blocks: int, keep: StoredRun | None = None) -> bool:
        """Remove what was used longest ago, but for `keep`, until so many more blocks fit. Returns whether they do."""
        while self._runs.blocks + blocks > self._limits.max_blocks:
            run = self._runs.oldest(keep)
            if run is None:
                return False
            self.counts.evicted += run.size
            self._delete(run)
        return True

    def _delete(self, run: StoredRun) -> None:
        """Delete a run and all that follow it."""
        gone = [one.name for one in self._runs.remove(run)]
        for name in gone:
            self._writes.pop(name, None)
        self._files.delete(gone)

    def _on_written(self, order: FileWrite, done: FileDone) -> None:
        """Take the end of a write."""
        self._under_way -= 1
        run = self._runs.get(order.name)
        if run is None or self._writes.get(order.name) is not order:
            return
        del self._writes[order.name]
        if done.blocks:
            run.is_whole = True
            self.counts.written += run.size
        else:
            self.counts.skipped += run.size
            self._delete(run)

    # ends -----------------------------------------------------------------------------------------------------

    def drain(self) -> bool:
        """Land what has been read, and note what has been written. Returns whether host blocks came free or arrived."""
        ended = False
        for done in self._files.drain():
            if isinstance(done.order, FileWrite):
                self._on_written(done.order, done)
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
            lost = len(targets) - done.blocks
            if done.is_damage:
                self.counts.corrupt += lost
            else:
                self.counts.failed += lost
            if run := self._runs.get(done.damaged):
                self._delete(run)  # and all that follow it
        end = (read.first + arrived) * self._tree.block_bytes
        spare = insert_host(self._tree, read.namespace, read.key[:end], read.first, targets[:arrived])
        self._pools[HOST].free([*spare, *targets[arrived:]])

    def clear(self, namespace: Namespace) -> None:
        """Delete all of a namespace. What is being read of it is dropped when it comes."""
        for run in self._runs.first(namespace):
            self._delete(run)
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
        self._runs.check_integrity(part.run for read in self._reads.values() for part in read.parts)
        if self._runs.blocks > self._limits.max_blocks:
            raise PlanError("disk blocks", self._runs.blocks, f"at most {self._limits.max_blocks} may be stored")
        if {run.name for run in self._runs if not run.is_whole} != self._writes.keys():
            raise PlanError("writes", list(self._writes), "are not those of the runs without a file")


def _without(parts: Sequence[RunPart], first: int) -> list[RunPart]:
    """Return `parts` without their first blocks."""
    rest: list[RunPart] = []
    for part in parts:
        skip = min(first, part.count)
        first -= skip
        if skip < part.count:
            rest.append(RunPart(part.run, skip, part.count))
    return rest
