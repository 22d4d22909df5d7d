"""Which runs of blocks are stored on disk, found by the exact prefix before them.

A run is the content of one file: some full blocks that follow a prefix. It begins after `used` blocks of its parent.
What is stored is closed under prefixes. Runs are never split or changed.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kedge.errors import PlanError
from kedge.structures.prefixes import common_length
from kedge.types import Namespace


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
    """All runs, the least recently used first. A run is used no later than those before it, so the first is a leaf."""

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
        parent, used = (after.run, after.count) if after else (self._root(namespace), 0)
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

    def _root(self, namespace: Namespace) -> StoredRun:
        return self._roots.setdefault(namespace, StoredRun("", namespace))
