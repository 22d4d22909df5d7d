"""The thread that writes blocks of the host tier to files, and reads them back."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from kedge.cache.copies import FileDone, FileRead, FileWrite
from kedge.engine.common.folder_lock import lock_folder
from kedge.engine.local.disk.run_files import Bytes, RunFolder, StoredBlocks
from kedge.errors import ConfigError, StateDamaged
from kedge.kv.checksums import Seals, Sums
from kedge.kv.copy import HostStorage

logger = logging.getLogger(__name__)
T = TypeVar("T")
FLUSH_SECONDS = 10.0
"""Seconds that closing waits for what is to be written."""


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
