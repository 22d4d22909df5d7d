"""A folder that holds the last two snapshots of one engine's state.

    manifest.json               format, identity of the model, and the files of the last complete snapshot
    manifest.previous.json      the same of the snapshot before
    <sha256>.safetensors        one pool, or one template's prefix segments; named after its content
    lock                        held by the process that has the folder
    <file>.damaged-<time>       damaged files that were put aside by loading, the last few
    refused-<n>/                what lay here for another model or format, put aside by the first save

Every file is written under another name, forced to the disk, and renamed; manifests come after the records that they
name, the newer one first. So at any moment both manifests name whole files only. Only what neither of them names is
deleted. `Recovery` finds what is sound in a folder, and what replaces damaged files.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from kedge.anchors.saving import Record
from kedge.engine.common.folder_lock import lock_folder
from kedge.engine.common.state.files import (
    MANIFEST,
    PARTIAL,
    PREVIOUS,
    SUFFIX,
    Entry,
    Name,
    entry_of_file,
    manifest_of,
    read_manifest,
    read_record,
    write_record,
)
from kedge.errors import StateDamaged, StateRefused

MARK = ".damaged-"
MAX_PUT_ASIDE = 16
"""Maximum damaged files that a folder keeps; the oldest are deleted."""
BEFORE, RECORDS = "the snapshot before", "the records themselves"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged file of saved state, and what is lost by it."""

    file: str
    name: tuple[str, ...]
    """The pool or template that it held; empty for a manifest, and where it cannot be known"""
    reason: str
    replacement: str = ""
    """The content used instead, if any"""

    @property
    def lost(self) -> bool:
        """Whether the file's content has no replacement."""
        return not self.replacement

    def put_aside(self, folder: Path, *, rename: bool) -> None:
        """Log the damage and, if `rename`, give the file a name that is never read."""
        aside = _renamed(folder / self.file) if rename else None
        held = repr(" ".join(self.name)) if self.name else "what it lists or holds"
        cost = f"is taken from {self.replacement}" if self.replacement else "is lost"
        where = f"put aside as {aside}" if aside else "it was not put aside"
        logger.error("damaged state in %s: %s %s (%s); %s %s", folder, self.file, self.reason, where, held, cost)


def _renamed(path: Path) -> str | None:
    """Rename a damaged file. Returns its new name; None if there is no file, or it cannot be renamed."""
    target = path.with_name(f"{path.name}{MARK}{datetime.now(UTC):%Y%m%dT%H%M%S%f}")
    try:
        path.rename(target)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("cannot put %s aside: %s", path, error)
        return None
    return target.name


def forget_oldest(folder: Path) -> None:
    """Delete a folder's damaged files except for the last `MAX_PUT_ASIDE`."""
    aside = [path for path in folder.glob(f"*{MARK}*") if not path.is_dir()]
    for path in sorted(aside, key=lambda path: path.name.rpartition(MARK)[2])[:-MAX_PUT_ASIDE]:
        path.unlink(missing_ok=True)


class Recovery:
    """One reading of a folder, which it does not change before `put_aside`."""

    def __init__(self, path: Path, identity: str) -> None:
        """Read the manifests. Raises `StateRefused` for state of another model or format, and `OSError`."""
        self._path, self._identity = path, identity
        self.damages: list[Damage] = []
        self.snapshots = self._read_snapshots()
        """The last two snapshots, the newer first, or as many as there are"""

    def accepted(self, accept: Callable[[Record], None]) -> list[Entry]:
        """Return the entries that `accept` took, record by record from the last snapshot, or else from the one
        before.
        """
        before = {entry.name: entry for snapshot in self.snapshots[1:] for entry in snapshot}
        entries = self.snapshots[0] if self.snapshots else []
        copies = [dict.fromkeys([entry, before.get(entry.name, entry)]) for entry in entries]
        sound = [self._first_sound(list(of_name), accept) for of_name in copies]
        return [entry for entry in sound if entry]

    def put_aside(self, kept: Sequence[Entry]) -> None:
        """Rename and log damaged files, except for those that hold something sound under another name."""
        files = {entry.file for entry in kept}
        for damage in self.damages:
            damage.put_aside(self._path, rename=damage.file not in files)
        forget_oldest(self._path)

    def _first_sound(self, copies: Sequence[Entry], accept: Callable[[Record], None]) -> Entry | None:
        damaged: list[tuple[Entry, str]] = []
        sound = None
        for entry in copies:
            try:
                accept(read_record(self._path, entry, self._identity))
            except (StateDamaged, StateRefused) as damage:
                damaged.append((entry, damage.why))
            else:
                sound = entry
                break
        replacement = BEFORE if sound else ""
        self.damages += [Damage(entry.file, entry.name, why, replacement) for entry, why in damaged]
        return sound

    def _read_snapshots(self) -> list[list[Entry]]:
        sound: dict[str, list[Entry]] = {}
        broken: dict[str, str] = {}
        is_there = {name: os.path.lexists(self._path / name) for name in (MANIFEST, PREVIOUS)}
        for name in [one for one in is_there if is_there[one] or is_there[PREVIOUS]]:
            try:
                sound[name] = read_manifest(self._path / name, self._identity)
            except StateDamaged as damage:
                broken[name] = damage.why
            except StateRefused as refusal:
                if not sound:
                    raise
                broken[name] = refusal.why
        snapshots = list(sound.values()) or self._snapshots_of_records()
        replacement = next(iter(sound), RECORDS if snapshots else "")
        self.damages += [Damage(name, (), why, replacement) for name, why in broken.items()]
        return snapshots

    def _snapshots_of_records(self) -> list[list[Entry]]:
        """Return snapshots rebuilt from records where no manifest lists them: of each name the two latest."""
        copies: dict[Name, list[Entry]] = {}
        for path in sorted(self._path.glob(f"*{SUFFIX}"), key=lambda path: path.lstat().st_mtime_ns, reverse=True):
            try:
                entry = entry_of_file(path, self._identity)
            except StateDamaged as damage:
                self.damages.append(Damage(path.name, (), damage.why))
            else:
                copies.setdefault(entry.name, []).append(entry)
        generations = [[of_name[age] for of_name in copies.values() if age < len(of_name)] for age in (0, 1)]
        return [snapshot[::-1] for snapshot in generations if snapshot]


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
        kept = {entry.file for entry in (*newest, *before)}
        for path in self._path.iterdir():
            if path.suffix == PARTIAL or (path.suffix == SUFFIX and path.name not in kept):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()

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

    def _move_refused(self, refusal: StateRefused) -> None:
        """Move state of another model or format to a subfolder, which appears there complete.

        Files are linked first; without their manifests, the next `commit` deletes their old names.
        """
        aside = next(path for n in count(1) if not (path := self._path / f"refused-{n}").exists())
        partial = aside.with_name(f"{aside.name}{PARTIAL}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        manifests = [path for name in (MANIFEST, PREVIOUS) if (path := self._path / name).is_file()]
        for path in [*self._path.glob(f"*{SUFFIX}"), *manifests]:
            if path.is_file():
                try:
                    os.link(path, partial / path.name)
                except OSError:  # a file system without hard links
                    shutil.copy2(path, partial / path.name)
        self._force(partial)
        partial.rename(aside)
        self._force()
        for path in manifests:
            path.unlink()
        logger.warning("state that cannot be used is moved to %s: %s", aside, refusal)
