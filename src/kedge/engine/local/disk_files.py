"""The files of the disk tier, one per run of blocks, and the thread that writes blocks of the host tier to them and
reads them back.

    <sha256>.kv.safetensors     keys and values of some blocks, their token ids and checksums; named after the namespace
                                and all token ids up to its end
    lock                        held by the process that has the folder

A file is written under another name and renamed, so one that is there is whole; after a power failure it may not be,
which its checksums show. Anything else of these names (of another model, layout or format, damaged, or half written) is
deleted when the folder is opened.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save_file

from kedge.cache.copies import FileDone, FileRead, FileWrite
from kedge.cache.disk import run_name
from kedge.engine.common.folder_lock import lock_folder
from kedge.errors import ConfigError, StateDamaged
from kedge.kv.checksums import BlockSums, Seals, Sums
from kedge.kv.copy import HostStorage
from kedge.types import Namespace, TenantId

FORMAT = 1
SUFFIX, PARTIAL = ".kv.safetensors", ".part"
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_NONSENSE = (SafetensorError, AttributeError, LookupError, TypeError, ValueError)
logger = logging.getLogger(__name__)
T = TypeVar("T")
FLUSH_SECONDS = 10.0
"""Seconds that closing waits for what is to be written."""


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Keys and values of some blocks, each [layers, slots, kv_heads, bytes], with the checksum of each block."""

    keys: Bytes
    values: Bytes
    sums: Sums

    def sound(self, block_size: int) -> int:
        """Return how many leading blocks have the content that their checksums say."""
        pools = [torch.from_numpy(part) for part in (self.keys, self.values)]
        found = BlockSums(pools, block_size).of([(0, len(self.sums))])
        wrong = np.flatnonzero(found != self.sums)
        return int(wrong[0]) if len(wrong) else len(self.sums)


class RunFolder:
    """The files of one engine in one folder, which nobody else uses."""

    def __init__(self, path: Path, identity: str, slot_shape: tuple[int, int, int], block_size: int) -> None:
        """`identity` is of all that the KV depends on but its tokens; `slot_shape` is [layers, kv_heads, bytes]."""
        self._path, self._identity, self._block_size = path, identity, block_size
        self._slot_shape = slot_shape

    def scan(self) -> list[FileWrite]:
        """Return what is stored, the least recently used first, and delete what is of no use. Raises `OSError`."""
        found: list[tuple[int, FileWrite]] = []
        for path in self._path.iterdir():
            if path.name.endswith(PARTIAL):
                path.unlink(missing_ok=True)
            elif path.name.endswith(SUFFIX):
                try:
                    found.append((path.stat().st_mtime_ns, self._head(path)))
                except (*_NONSENSE, OSError, StateDamaged) as error:
                    logger.warning("%s is deleted: %s", path, error)
                    path.unlink(missing_ok=True)
        return [head for _, head in sorted(found, key=lambda one: one[0])]

    def _head(self, path: Path) -> FileWrite:
        with safe_open(path, "np") as file:
            head = json.loads(file.metadata()["kedge"])
            if (head["format"], head["identity"]) != (FORMAT, self._identity):
                raise StateDamaged("disk", str(path), "is of another model, layout or format")
            key = file.get_tensor("tokens").tobytes()
        tenant, partition = head["namespace"]
        namespace = Namespace(TenantId(tenant), partition)
        name = run_name(head["parent"], head["used"], namespace, key)
        if path.name != name + SUFFIX:
            raise StateDamaged("disk", str(path), "has other tokens than its name says")
        return FileWrite(name, head["parent"], head["used"], namespace, key, ())

    def write(self, order: FileWrite, blocks: StoredBlocks) -> None:
        """Write a file. Raises `OSError`, having left nothing."""
        head = {
            "format": FORMAT, "identity": self._identity, "namespace": order.namespace, "parent": order.parent,
            "used": order.used,
        }  # fmt: skip
        tokens = np.frombuffer(order.key, np.int32)
        tensors: dict[str, Any] = {"keys": blocks.keys, "values": blocks.values, "sums": blocks.sums, "tokens": tokens}
        path = self._file(order.name)
        partial = path.with_name(path.name + PARTIAL)
        try:
            save_file(tensors, partial, {"kedge": json.dumps(head)})
            partial.replace(path)
        except SafetensorError as error:
            partial.unlink(missing_ok=True)
            raise OSError(f"cannot write {partial}: {error}") from error
        except OSError:
            partial.unlink(missing_ok=True)
            raise

    def read(self, name: str, start: int, stop: int) -> StoredBlocks:
        """Return blocks [start, stop) of a file. Raises `StateDamaged` and `OSError`."""
        path, size = self._file(name), self._block_size
        content = path.read_bytes()  # not mapped: of a file that cannot be read that would kill the process
        try:
            tensors = load(content)
            slots = slice(start * size, stop * size)
            keys, values = (tensors[part][:, slots] for part in ("keys", "values"))
            found = StoredBlocks(keys, values, tensors["sums"][start:stop])
        except _NONSENSE as error:
            raise StateDamaged("disk", str(path), f"makes no sense: {error!s:.200}") from error
        layers, *slot = self._slot_shape
        shape = (layers, (stop - start) * size, *slot)
        if not (keys.shape == values.shape == shape and keys.dtype == values.dtype == np.uint8):
            raise StateDamaged("disk", str(path), "has another shape than the model's KV")
        if found.sums.shape != (stop - start,) or found.sums.dtype != np.int64:
            raise StateDamaged("disk", str(path), "has no checksums of its blocks")
        os.utime(path)
        return found

    def delete(self, names: Iterable[str]) -> None:
        """Delete files, in this order. What cannot be deleted is logged, and found again at the next start."""
        for name in names:
            try:
                self._file(name).unlink(missing_ok=True)
            except OSError as error:
                logger.warning("%s cannot be deleted: %s", name, error)

    def _file(self, name: str) -> Path:
        return self._path / (name + SUFFIX)


@dataclass(frozen=True, slots=True)
class _Write:
    """A write, with the checksums that its blocks had when it was ordered."""

    order: FileWrite
    sums: Sums


class DiskFiles:
    """The files of one folder and their thread, as `kedge.cache.copies.BlockFiles` specifies. Reads go first."""

    def __init__(
        self,
        path: Path,
        identity: str,
        host: HostStorage,
        block_size: int,
        seals: Seals,
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the folder and start the thread. `seals` are the checksums of the host's blocks; `on_done` is called on
        the thread whenever there is something to drain. Raises `ConfigError` if the folder cannot be used.
        """
        self._pools: list[Bytes] = [pool.view(torch.uint8).numpy() for pool in (host.keys, host.values)]
        self._block_size, self._seals, self._on_done = block_size, seals, on_done
        layers, _, heads, nbytes = self._pools[0].shape
        self._folder = RunFolder(path, f"{identity} {block_size}", (layers, heads, nbytes), block_size)
        try:
            self._lock = lock_folder(path, "engine.tiers.disk_path")
            self._stored = self._folder.scan()
        except OSError as error:
            raise ConfigError("engine.tiers.disk_path", str(path), f"cannot be used: {error}") from error
        self._reads: deque[FileRead] = deque()
        self._writes: deque[_Write | Sequence[str]] = deque()
        self._changed = threading.Condition()
        self._closing: float | None = None
        self._done: queue.SimpleQueue[FileDone] = queue.SimpleQueue()
        self._has_failed = False
        self._thread = threading.Thread(target=self._serve, name="kedge-disk", daemon=True)
        self._thread.start()

    def stored(self) -> list[FileWrite]:
        """Return what was stored when the folder was opened, the least recently used first."""
        stored, self._stored = self._stored, []
        return stored

    def write(self, order: FileWrite) -> None:
        """Queue a write."""
        self._put(self._writes, _Write(order, self._seals.noted(order.blocks)))

    def read(self, order: FileRead) -> None:
        """Queue a read."""
        self._put(self._reads, order)

    def delete(self, names: Sequence[str]) -> None:
        """Queue the deletion of files."""
        if names:
            self._put(self._writes, names)

    def drain(self) -> list[FileDone]:
        """Return what has ended since the last call."""
        return [self._done.get_nowait() for _ in range(self._done.qsize())]

    def close(self) -> None:
        """End the thread, after what is to be written or `FLUSH_SECONDS`, and give the folder back. Idempotent."""
        with self._changed:
            if self._closing is not None:
                return
            self._closing = time.monotonic() + FLUSH_SECONDS
            self._changed.notify()
        self._thread.join()
        os.close(self._lock)

    def _put(self, orders: deque[T], order: T) -> None:
        with self._changed:
            orders.append(order)
            self._changed.notify()

    # the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (order := self._next()) is not None:
            if isinstance(order, FileRead):
                self._end(self._read(order))
            elif isinstance(order, _Write):
                self._end(FileDone(order.order, self._write(order)))
            else:
                self._folder.delete(order)

    def _next(self) -> FileRead | _Write | Sequence[str] | None:
        """Wait for an order. Returns None once closed, with nothing left to write or no time for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._reads or self._writes or self._closing is not None)
            if self._closing is not None and (not self._writes or time.monotonic() > self._closing):
                return None
            return self._reads.popleft() if self._reads and self._closing is None else self._writes.popleft()

    def _end(self, done: FileDone) -> None:
        self._done.put(done)
        self._on_done()

    def _write(self, write: _Write) -> int:
        """Write a file. Returns how many blocks it has: none where they have changed since, or the disk failed."""
        order = write.order
        try:
            keys, values = (self._gathered(pool, order.blocks) for pool in self._pools)
            blocks = StoredBlocks(keys, values, write.sums)
            if blocks.sound(self._block_size) < len(order.blocks):
                return 0
            self._folder.write(order, blocks)
        except Exception as error:  # whatever a disk or its driver raises: then it is not stored
            self._note_failure(error)
            return 0
        self._has_failed = False
        return len(order.blocks)

    def _read(self, order: FileRead) -> FileDone:
        began, done = time.monotonic(), 0
        for name, start, stop in order.parts:
            try:
                blocks = self._folder.read(name, start, stop)
                sound = blocks.sound(self._block_size)
                self._scatter(blocks, order.targets[done : done + sound])
            except StateDamaged as error:
                logger.warning("%s", error)
                return FileDone(order, done, name, True, time.monotonic() - began)
            except Exception as error:  # whatever a disk or its driver raises: then it is computed
                self._note_failure(error)
                return FileDone(order, done, name, False, time.monotonic() - began)
            done += sound
            if sound < stop - start:
                logger.warning("%s has another content than was written", name)
                return FileDone(order, done, name, True, time.monotonic() - began)
        return FileDone(order, done, seconds=time.monotonic() - began)

    def _gathered(self, pool: Bytes, blocks: Sequence[int]) -> Bytes:
        """Return a copy of some blocks of a host pool."""
        size = self._block_size
        copy = np.empty((pool.shape[0], len(blocks) * size, *pool.shape[2:]), np.uint8)
        for at, block in enumerate(blocks):
            copy[:, at * size : (at + 1) * size] = pool[:, block * size : (block + 1) * size]
        return copy

    def _scatter(self, found: StoredBlocks, targets: Sequence[int]) -> None:
        """Write blocks to the host's pools, with their checksums."""
        size = self._block_size
        for pool, part in zip(self._pools, (found.keys, found.values), strict=True):
            for at, block in enumerate(targets):
                pool[:, block * size : (block + 1) * size] = part[:, at * size : (at + 1) * size]
        self._seals.restore(targets, found.sums[: len(targets)])

    def _note_failure(self, error: Exception) -> None:
        """Log the first of several failures in a row."""
        if not self._has_failed:
            logger.warning("the disk tier failed: %r", error)
        self._has_failed = True
