"""The files of the disk tier, one per run of blocks.

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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save_file

from kedge.cache.copies import FileWrite
from kedge.cache.disk import run_name
from kedge.errors import StateDamaged
from kedge.kv.checksums import BlockSums, Sums
from kedge.types import Namespace, TenantId

logger = logging.getLogger(__name__)
FORMAT = 1
SUFFIX, PARTIAL = ".kv.safetensors", ".part"
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_NONSENSE = (SafetensorError, AttributeError, LookupError, TypeError, ValueError)


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
