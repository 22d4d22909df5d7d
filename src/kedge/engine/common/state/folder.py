"""A folder that holds the last two snapshots of one engine's state.

    manifest.json               format, identity of the model, and the files of the last complete snapshot
    manifest.previous.json      the same of the snapshot before
    <sha256>.safetensors        one pool, or one template's prefix segments; named after its content
    lock                        held by the process that has the folder
    <file>.damaged-<time>       damaged files that were put aside by loading, the last few
    refused-<n>/                what lay here for another model or format, put aside by the first save

Every file is written under another name, forced to the disk, and renamed; manifests come after the records that they
name, the newer one first. So at any moment both manifests name whole files only. Only what neither of them names is
deleted.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

from kedge.anchors.saving import Record
from kedge.engine.common.folder_lock import lock_folder
from kedge.engine.common.state.damage import Damage
from kedge.engine.common.state.files import MANIFEST, PARTIAL, PREVIOUS, SUFFIX, Entry, manifest_of, write_record
from kedge.engine.common.state.recovery import Recovery
from kedge.errors import StateRefused

logger = logging.getLogger(__name__)


class StateFolder:
    """A folder of records of one identity. Created if missing, and locked until it is closed."""

    def __init__(self, path: Path, identity: str) -> None:
        """Open and lock the folder. Raises `ConfigError` if another process uses it, and `OSError`."""
        self._lock = lock_folder(path, "state")
        self._path, self._identity = path, identity
        self._snapshots: list[list[Entry]] | None = None
        """The last two snapshots, the newer first, once they have been read"""

    def close(self) -> None:
        """Unlock the folder."""
        os.close(self._lock)

    def recover(self, accept: Callable[[Record], None]) -> tuple[list[Entry], list[Damage]]:
        """Pass all sound records of the last snapshot to `accept`, and for damaged ones those of the snapshot before.

        `accept` raises `StateDamaged` for an invalid record. Damaged files are moved aside and logged. Returns what was
        accepted and what was damaged. Raises `StateRefused` for state of another model or format, and `OSError`.
        """
        self._snapshots = None
        found = Recovery(self._path, self._identity)
        sound = found.accepted(accept)
        self._snapshots = [sound, *found.snapshots[1:]] if found.snapshots else []
        found.put_aside(kept=sound)
        return sound, found.damages

    def put(self, record: Record) -> Entry:
        """Write a record, which is part of no snapshot until `commit`. Raises `OSError`."""
        self._claim()
        return write_record(self._path, record, self._identity)

    def has(self, entry: Entry) -> bool:
        """Return whether the file exists with its size. Its content is not read."""
        path = self._path / entry.file
        return path.is_file() and path.stat().st_size == entry.nbytes

    def commit(self, entries: Sequence[Entry]) -> None:
        """Make these entries the last snapshot, and the last one the previous; delete files that neither lists. Raises
        `OSError`.

        The first snapshot is its own predecessor, so that a single damaged manifest costs nothing.
        """
        newest, known = list(entries), self._claim()
        before = next((snapshot for snapshot in known if snapshot != newest), newest)
        contents = {name: manifest_of(one, self._identity) for name, one in ((MANIFEST, newest), (PREVIOUS, before))}
        if any(not self._says(name, content) for name, content in contents.items()):
            for name, content in contents.items():
                self._force()
                self._write(name, content)
            self._force()
        self._snapshots = [newest, before]
        self._sweep({entry.file for entry in (*newest, *before)})

    def _claim(self) -> list[list[Entry]]:
        """Return the existing snapshots. Before the first write, state of another model is moved away."""
        if self._snapshots is None:
            try:
                found = Recovery(self._path, self._identity)
                found.put_aside(kept=[entry for snapshot in found.snapshots for entry in snapshot])
                self._snapshots = found.snapshots
            except StateRefused as refusal:
                self._move_refused(refusal)
                self._snapshots = []
        return self._snapshots

    def _says(self, name: str, content: bytes) -> bool:
        path = self._path / name
        return path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content

    def _write(self, name: str, content: bytes) -> None:
        partial = self._path / f"{name}{PARTIAL}"
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._path / name)

    def _force(self, folder: Path | None = None) -> None:
        """Sync the folder, which makes renames durable."""
        descriptor = os.open(folder or self._path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _sweep(self, kept: set[str]) -> None:
        for path in self._path.iterdir():
            if path.suffix == PARTIAL or (path.suffix == SUFFIX and path.name not in kept):
                _remove(path)

    def _move_refused(self, refusal: StateRefused) -> None:
        """Move state of another model or format to a subfolder, which appears there complete.

        Files are linked first; without their manifests, the next sweep deletes their old names.
        """
        aside = next(path for n in count(1) if not (path := self._path / f"refused-{n}").exists())
        partial = aside.with_name(f"{aside.name}{PARTIAL}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        manifests = [path for name in (MANIFEST, PREVIOUS) if (path := self._path / name).is_file()]
        for path in [*self._path.glob(f"*{SUFFIX}"), *manifests]:
            if path.is_file():
                _link(path, partial / path.name)
        self._force(partial)
        partial.rename(aside)
        self._force()
        for path in manifests:
            path.unlink()
        logger.warning("state that cannot be used is moved to %s: %s", aside, refusal)


def _link(source: Path, target: Path) -> None:
    """Hard-link a file; copy it if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
