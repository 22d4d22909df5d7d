"""Recovery of saved state: what is sound in a folder, and what replaces damaged files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from kedge.anchors.saving import Record
from kedge.engine.common.state.damage import Damage, forget_oldest
from kedge.engine.common.state.files import (
    MANIFEST,
    PREVIOUS,
    SUFFIX,
    Entry,
    Name,
    entry_of_file,
    read_manifest,
    read_record,
)
from kedge.errors import StateDamaged, StateRefused

BEFORE, RECORDS = "the snapshot before", "the records themselves"


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
        for name in self._manifests():
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

    def _manifests(self) -> tuple[str, ...]:
        """Return the names of the expected manifests."""
        if os.path.lexists(self._path / PREVIOUS):
            return MANIFEST, PREVIOUS
        return (MANIFEST,) if os.path.lexists(self._path / MANIFEST) else ()

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
