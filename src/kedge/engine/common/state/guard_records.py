"""The guard's records in a snapshot: one record for each workflow of a namespace, without tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from typing import Protocol

from kedge.anchors.saving import Record
from kedge.engine.common.state.files import Entry, Name
from kedge.engine.common.state.folder import StateFolder
from kedge.errors import StateDamaged
from kedge.reuse.guard.guard import Group
from kedge.reuse.guard.record import GuardRecord, from_data
from kedge.types import Namespace, WorkflowId

GUARD = "guard"
Written = dict[Name, tuple[Hashable, Entry]]
"""The entries in a folder, with what tells whether their content has changed"""
Restored = dict[Group, dict[tuple[str, str], GuardRecord]]


class SavesRecords(Protocol):
    """A guard whose records are saved. Any thread may call."""

    def saved(self) -> Mapping[Group, list[dict[str, object]]]: ...

    def restore(self, groups: Mapping[Group, Mapping[tuple[str, str], GuardRecord]]) -> None: ...


def guard_records(guard: SavesRecords) -> list[Record]:
    """Return the guard's records as they are now."""
    return [
        Record((GUARD, str(namespace), workflow), {"records": held}, {})
        for (namespace, workflow), held in guard.saved().items()
    ]


def write_guard(guard: SavesRecords, files: StateFolder, written: Mapping[Name, tuple[Hashable, Entry]]) -> Written:
    """Write the guard's records as they are now, of those in `written` the changed ones only. Raises `OSError`."""
    return {record.name: _put(record, files, written.get(record.name)) for record in guard_records(guard)}


def _put(record: Record, files: StateFolder, before: tuple[Hashable, Entry] | None) -> tuple[Hashable, Entry]:
    content = json.dumps(record.data)
    if before and before[0] == content and files.has(before[1]):
        return before
    return content, files.put(record)


class RestoredGuard:
    """Guard records that are read back, and not yet part of any guard."""

    def __init__(self, others: Callable[[Record], None]) -> None:
        """`others` takes the records of other kinds."""
        self._others = others
        self.groups: Restored = {}

    def add(self, record: Record) -> None:
        """Take a record of any kind. Raises `StateDamaged` for an invalid one, and adds nothing then."""
        if record.name[0] != GUARD:
            return self._others(record)
        try:
            _, namespace, workflow = record.name
            self.groups[Namespace.parse(namespace), WorkflowId(workflow)] = from_data(record.data["records"])
        except (ValueError, LookupError, TypeError) as error:
            raise StateDamaged("record", record.name, f"makes no sense: {error!r:.300}") from error
        return None
