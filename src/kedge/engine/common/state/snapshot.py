"""Snapshots of what an engine has learned, saved to a folder (see `StateFolder`), and loaded from it.

The guard's records are part of a snapshot, one for each workflow of a namespace, without tensors. Where the guard is in
another process than the anchors, its records have a folder of their own.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.anchors.base_store import BaseStore
from kedge.anchors.saving import POOL, TEMPLATE, VALUE, Key, Record, Restored, keys, name_of, record_of, signature_of
from kedge.anchors.store import AnchorStore
from kedge.engine.common.state.files import Damage, Entry, Name, StateFolder
from kedge.errors import StateDamaged
from kedge.kv.segment import KVSegment
from kedge.reuse.guard.guard import Group, QualityGuard, SavedGroup
from kedge.types import Namespace, WorkflowId

GUARD = "guard"
AskLearned = Callable[[Callable[[AnchorStore, BaseStore], Any]], Any]
"""A call that runs on the engine's thread with what it has learned"""


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
    """Files found damaged on loading"""


class EngineState:
    """The state of one engine in one folder. Any thread may call; `ask` runs calls on the engine's thread."""

    def __init__(
        self,
        folder: Path,
        identity: str,
        like: KVSegment | None = None,
        ask: AskLearned | None = None,
        *,
        values: bool = False,
        guard: QualityGuard | None = None,
    ) -> None:
        """Open the folder. `identity` is a text of all that saved KV depends on, `like` is KV, perhaps of no tokens, of
        the model's shape, dtype and device; base KV of values is saved if `values`, and the records of a `guard` with
        it. Without `ask` these are all. Raises `ConfigError` if another process uses the folder, and `OSError`.
        """
        self.folder = folder
        self._files = StateFolder(folder, identity, str(like.dtype).removeprefix("torch.") if like else None)
        self._like, self._values, self._ask, self._guard, self._lock = like, values, ask, guard, threading.Lock()
        self._written: dict[Name, tuple[Hashable, Entry]] = {}
        """Each record with its signature when it was written; the guard's records with their content"""

    def save(self) -> SavedState:
        """Write a snapshot of what is learned now, see `LocalEngine.save`."""
        began = time.monotonic()
        with self._lock, self._files.writing():
            ask = self._ask
            found = ask(lambda anchors, bases: keys(anchors, bases, values=self._values)) if ask else []
            made = {name_of(key): self._saved(ask, key) for key in found if ask}
            for (namespace, workflow), held in self._guard.saved().items() if self._guard else ():
                record, content = Record((GUARD, str(namespace), workflow), held, {}), json.dumps(held)
                made[record.name] = self._unchanged(record.name, content) or (content, self._files.put(record))
            self._written = {name: one for name, one in made.items() if one}
            entries = [entry for _, entry in self._written.values()]
            self._files.commit(entries)
        return summary(entries, began)

    def load(self) -> SavedState:
        """Replace what the engine has learned by the sound content of the snapshot, see `LocalEngine.load`."""
        began = time.monotonic()
        with self._lock:
            groups: dict[Group, SavedGroup] = {}
            found = Restored(self._ask(lambda anchors, _: anchors), self._like) if self._ask and self._like else None

            def accept(record: Record) -> None:
                if record.name[0] == GUARD:
                    groups.update([_group(record)])
                elif found:
                    found.add(record)
                else:
                    raise StateDamaged("record", record.name, "is no record of a guard")

            entries, damaged = self._files.recover(accept)
            if self._ask and found:
                self._ask(found.install)
            if self._guard:
                self._guard.restore(groups)
            self._written.clear()
        return summary(entries, began, damaged)

    def close(self) -> None:
        """Give the folder back."""
        with self._lock:
            self._files.close()

    def _saved(self, ask: AskLearned, key: Key) -> tuple[Hashable, Entry] | None:
        """Write what has this key if it has changed. Returns its signature and entry; None if it has gone."""
        name = name_of(key)

        def look(anchors: AnchorStore, bases: BaseStore) -> tuple[Hashable, Record | None]:
            """Copy it, unless it has gone or is as it was written."""
            signature = signature_of(anchors, bases, key)
            is_known = signature is None or self._unchanged(name, signature)
            return signature, None if is_known else record_of(anchors, bases, key)

        signature, record = ask(look)
        return (signature, self._files.put(record)) if record else self._unchanged(name, signature)

    def _unchanged(self, name: Name, signature: Hashable) -> tuple[Hashable, Entry] | None:
        """Return the signature and the entry of a record that was written with this signature and is still there."""
        before = self._written.get(name)
        return before if before and before[0] == signature and self._files.has(before[1]) else None


def _group(record: Record) -> tuple[Group, SavedGroup]:
    """Return the guard's records of one workflow. Raises `StateDamaged` for invalid ones."""
    try:
        _, namespace, workflow = record.name
        return (Namespace.parse(namespace), WorkflowId(workflow)), SavedGroup.model_validate(record.data)
    except (ValueError, LookupError, TypeError) as error:
        raise StateDamaged("record", record.name, f"is malformed: {error!r:.300}") from error


def summary(entries: Sequence[Entry], began: float, damaged: Sequence[Damage] = ()) -> SavedState:
    """Return what a snapshot holds that was begun at a time of the monotonic clock."""
    kinds = Counter(entry.name[0] for entry in entries)
    nbytes = sum(entry.nbytes for entry in entries)
    counts = kinds[POOL], kinds[TEMPLATE], kinds[VALUE]
    return SavedState(*counts, nbytes, time.monotonic() - began, tuple(damaged))
