"""The records of a guard that is in another process than the anchors: a folder of their own."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from kedge.anchors.saving import Record
from kedge.engine.common.state.folder import StateFolder
from kedge.engine.common.state.guard_records import RestoredGuard, SavesRecords, Written, write_guard
from kedge.engine.common.state.snapshot import SavedState, summary
from kedge.errors import StateDamaged


class GuardFolder:
    """The guard's records in one folder. Any thread may call."""

    def __init__(self, folder: Path, identity: str, guard: SavesRecords) -> None:
        """Open the folder. `identity` is a text of all that the records depend on. Raises `ConfigError` if another
        process uses the folder, and `OSError`.
        """
        self.folder = folder
        self._files, self._guard, self._lock = StateFolder(folder, identity), guard, threading.Lock()
        self._written: Written = {}

    def save(self) -> SavedState:
        """Write a snapshot of the records as they are now. Raises `OSError`."""
        began = time.monotonic()
        with self._lock:
            self._written = write_guard(self._guard, self._files, self._written)
            entries = [entry for _, entry in self._written.values()]
            self._files.commit(entries)
        return summary(entries, began)

    def load(self) -> SavedState:
        """Replace the guard's records by the sound ones of the last snapshots, as `EngineState.load` does. Raises
        `StateRefused`, having changed nothing, and `OSError`.
        """
        began = time.monotonic()
        with self._lock:
            found = RestoredGuard(_refuse)
            entries, damaged = self._files.recover(found.add)
            self._guard.restore(found.groups)
            self._written.clear()
        return summary(entries, began, damaged)

    def close(self) -> None:
        """Give the folder back."""
        with self._lock:
            self._files.close()


def _refuse(record: Record) -> None:
    raise StateDamaged("record", record.name, "is no record of a guard")
