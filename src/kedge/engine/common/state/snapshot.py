"""Snapshots of what an engine has learned, saved to a folder (see `StateFolder`), and loaded from it.

The guard's records are part of a snapshot, one record for each workflow of a namespace, without tensors; those of a
guard that is in another process than the anchors have a folder of their own (`GuardFolder`).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from kedge.anchors.base_store import BaseStore
from kedge.anchors.saving import POOL, TEMPLATE, VALUE, Key, Record, Restored, keys, name_of, view
from kedge.anchors.store import AnchorStore
from kedge.engine.common.state.files import Entry, Name
from kedge.engine.common.state.folder import Damage, StateFolder
from kedge.errors import StateDamaged
from kedge.kv.segment import KVSegment
from kedge.reuse.guard.guard import Group, QualityGuard, SavedGroup
from kedge.types import Namespace, WorkflowId

GUARD = "guard"
Written = dict[Name, tuple[Hashable, Entry]]
"""The entries in a folder, with what tells whether their content has changed"""
logger = logging.getLogger(__name__)
TRIES = 8
"""Attempts to record a pool that keeps changing, before its earlier record is used."""
T = TypeVar("T")


def guard_records(guard: QualityGuard) -> list[Record]:
    """Return the guard's records as they are now."""
    return [
        Record((GUARD, str(namespace), workflow), held, {}) for (namespace, workflow), held in guard.saved().items()
    ]


def write_guard(guard: QualityGuard, files: StateFolder, written: Mapping[Name, tuple[Hashable, Entry]]) -> Written:
    """Write the guard's records as they are now, of those in `written` the changed ones only. Raises `OSError`."""
    new: Written = {}
    for record in guard_records(guard):
        content, before = json.dumps(record.data), written.get(record.name)
        is_same = before is not None and before[0] == content and files.has(before[1])
        new[record.name] = before if before is not None and is_same else (content, files.put(record))
    return new


class RestoredGuard:
    """Guard records that are read back, and not yet part of any guard."""

    def __init__(self, others: Callable[[Record], None]) -> None:
        """`others` takes the records of other kinds."""
        self._others = others
        self.groups: dict[Group, SavedGroup] = {}

    def add(self, record: Record) -> None:
        """Take a record of any kind. Raises `StateDamaged` for an invalid one, and adds nothing then."""
        if record.name[0] != GUARD:
            return self._others(record)
        try:
            _, namespace, workflow = record.name
            self.groups[Namespace.parse(namespace), WorkflowId(workflow)] = SavedGroup.read(record.data)
        except (ValueError, LookupError, TypeError) as error:
            raise StateDamaged("record", record.name, f"makes no sense: {error!r:.300}") from error
        return None


class AskLearned(Protocol):
    """A call that runs on the engine's thread with what it has learned."""

    def __call__(self, question: Callable[[AnchorStore, BaseStore], T]) -> T: ...


@dataclass(frozen=True, slots=True)
class SavedState:
    """The content of a snapshot, as saved or loaded."""

    pools: int
    templates: int
    values: int
    """Values with base KV, where an engine keeps that"""
    nbytes: int
    """Bytes on disk"""
    seconds: float
    damaged: tuple[Damage, ...] = ()
    """Files found damaged on loading, and what replaced them"""


class EngineState:
    """The state of one engine in one folder. Any thread may call; `ask` runs calls on the engine's thread."""

    def __init__(
        self,
        folder: Path,
        identity: str,
        like: KVSegment,
        ask: AskLearned,
        *,
        values: bool = False,
        guard: QualityGuard | None = None,
    ) -> None:
        """Open the folder. `identity` is a text of all that saved KV depends on, `like` is KV, perhaps of no tokens, of
        the model's shape, dtype and device; base KV of values is saved if `values`, and the records of a `guard` with
        it. Raises `ConfigError` if another process uses the folder, and `OSError`.
        """
        self.folder = folder
        self._files = StateFolder(folder, identity)
        self._like, self._values, self._ask, self._guard, self._lock = like, values, ask, guard, threading.Lock()
        self._written: Written = {}
        """By the signatures of the views that entries were made from; those of the guard by their content"""

    def save(self) -> SavedState:
        """Write a snapshot of what is learned now, see `LocalEngine.save`."""
        began = time.monotonic()
        with self._lock:
            found = self._ask(lambda anchors, bases: keys(anchors, bases, values=self._values))
            made = {name_of(key): self._saved(key) for key in found}
            if self._guard:
                made |= write_guard(self._guard, self._files, self._written)
            self._written = {name: one for name, one in made.items() if one}
            entries = [entry for _, entry in self._written.values()]
            self._files.commit(entries)
        return summary(entries, began)

    def load(self) -> SavedState:
        """Replace what the engine has learned by the sound content of the last snapshots, see `LocalEngine.load`."""
        began = time.monotonic()
        with self._lock:
            found = Restored(self._ask(lambda anchors, _: anchors), self._like)
            guard = RestoredGuard(found.add)
            entries, damaged = self._files.recover(guard.add)
            self._ask(found.install)
            if self._guard:
                self._guard.restore(guard.groups)
            self._written.clear()
        return summary(entries, began, damaged)

    def close(self) -> None:
        """Give the folder back."""
        with self._lock:
            self._files.close()

    def _saved(self, key: Key) -> tuple[Hashable, Entry] | None:
        """Write what has this key if it has changed. Returns its signature and entry; None if it has gone."""
        before = self._written.get(name_of(key))
        for _ in range(TRIES):
            now = self._ask(lambda anchors, bases: view(anchors, bases, key))
            if now is None:
                return None
            if before and before[0] == now.signature and self._files.has(before[1]):
                return before
            if record := now.record():
                return now.signature, self._files.put(record)
        logger.warning("%s learns faster than it is copied; the snapshot has it as it was before", name_of(key))
        return before


class StateKeeper:
    """The engine's state folder, opened when it is first asked for. Any thread may call."""

    def __init__(self, open_state: Callable[[Path], EngineState]) -> None:
        self._open = open_state
        self._lock = threading.Lock()
        self._state: EngineState | None = None

    def close(self) -> None:
        """Give the folder back."""
        with self._lock:
            self._give_back()

    def of(self, folder: Path) -> EngineState:
        """Return the engine's state in a folder; another one is given back."""
        with self._lock:
            if self._state is None or self._state.folder != folder:
                self._give_back()
                self._state = self._open(folder)
            return self._state

    def _give_back(self) -> None:
        state, self._state = self._state, None
        if state:
            state.close()


def summary(entries: Sequence[Entry], began: float, damaged: Sequence[Damage] = ()) -> SavedState:
    """Return what a snapshot holds that was begun at a time of the monotonic clock."""
    kinds = Counter(entry.name[0] for entry in entries)
    nbytes = sum(entry.nbytes for entry in entries)
    counts = kinds[POOL], kinds[TEMPLATE], kinds[VALUE]
    return SavedState(*counts, nbytes, time.monotonic() - began, tuple(damaged))


class GuardFolder:
    """The guard's records in one folder. Any thread may call."""

    def __init__(self, folder: Path, identity: str, guard: QualityGuard) -> None:
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
