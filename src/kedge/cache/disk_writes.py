"""What is on disk and what is being written there, within its bound: what was used longest ago goes first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kedge.cache.copies import BlockFiles, FileDone, FileWrite
from kedge.cache.node import HOST, TreeNode
from kedge.cache.radix_tree import RadixTree
from kedge.cache.stored_runs import RunPart, StoredRun, StoredRuns
from kedge.errors import ConfigError, PlanError
from kedge.settings import TierSettings

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
