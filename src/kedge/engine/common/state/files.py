"""A folder that holds one snapshot of what an engine has learned: records, named after their content, and a manifest.

    manifest.json           format, dtype and identity of the model, and the files of the snapshot
    <sha256>.safetensors    one pool, one template's prefix segments, or the guard's records of one workflow
    lock                    held by the process that has the folder
    refused-<n>/            what lay here for another model or format, moved there by the first save

Every file is written under another name, forced to the disk, and renamed; the manifest comes after the records that it
names, and only what it does not name is deleted, before and after each save. So a process may be killed at any moment,
and the disk be full. A damaged record costs what it held, a damaged manifest all: it is logged, and learned again.
"""

import errno
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kedge.anchors.saving import Record
from kedge.engine.common.folder_lock import lock_folder
from kedge.errors import StateDamaged, StateRefused

FORMAT = 2
MANIFEST = "manifest.json"
SUFFIX, PARTIAL = ".safetensors", ".part"
Name = tuple[str, ...]
_FILE = re.compile(rf"[0-9a-f]{{64}}{re.escape(SUFFIX)}")
_DAMAGED_DISK = frozenset({errno.ENOENT, errno.EISDIR, errno.EIO, errno.EBADMSG, errno.ELOOP})
"""Errors that mean a damaged file, as opposed to a problem of this process or its permissions"""
_WHY = {
    "format": "this engine has {!r}",
    "dtype": "this engine computes in {}: set dtype to what was saved",
    "identity": "this engine has {!r}: another model, tokenizer, estimator or dtype",
}
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a snapshot, with the name of its content."""

    name: Name
    file: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged file of saved state."""

    file: str
    name: Name
    """The pool or template that it held; empty for a manifest"""
    reason: str


class StateFolder:
    """A folder of records of one identity. Created if missing, and locked until it is closed."""

    def __init__(self, path: Path, identity: str, dtype: str | None = None) -> None:
        """Open and lock the folder; `dtype` is that of its KV. Raises `ConfigError` if another process uses it, and
        `OSError`.
        """
        self._lock = lock_folder(path, "state")
        own = {"dtype": dtype} if dtype else {}
        self._path, self._head = path, {"format": FORMAT, **own, "identity": identity}

    def close(self) -> None:
        """Unlock the folder."""
        os.close(self._lock)

    def recover(self, accept: Callable[[Record], None]) -> tuple[list[Entry], list[Damage]]:
        """Pass all sound records of the snapshot to `accept`, which raises `StateDamaged` for an invalid one.

        Returns what was accepted, and what is damaged, which is logged. Raises `StateRefused` for state of another
        model or format, having passed nothing on, and `OSError`.
        """
        sound, damaged = list[Entry](), list[Damage]()
        for entry in self._listed(damaged):
            try:
                accept(self._read(entry))
                sound.append(entry)
            except StateDamaged as damage:
                damaged.append(Damage(entry.file, entry.name, damage.why))
        for one in damaged:
            held = repr(" ".join(one.name)) if one.name else "what it lists"
            logger.error("damaged state in %s: %s %s; %s is lost", self._path, one.file, one.reason, held)
        return sound, damaged

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Delete what no snapshot names before and after a save: one that has failed leaves its records, and with one a
        minute the disk would fill up. State of another model or format is moved to a folder of its own before, its
        manifest last. Raises `OSError`.
        """
        try:
            self._sweep()
        except StateRefused as refusal:
            aside = next(path for n in count(1) if not (path := self._path / f"refused-{n}").exists())
            aside.mkdir()
            for path in [*self._path.glob(f"*{SUFFIX}"), self._path / MANIFEST]:
                path.replace(aside / path.name)
            self._force()
            logger.warning("state that cannot be used is moved to %s: %s", aside, refusal)
        try:
            yield
        finally:
            self._sweep()

    def _sweep(self) -> None:
        """Delete what the manifest does not name. Raises `StateRefused`."""
        kept = {entry.file for entry in self._listed([])}
        for path in self._path.iterdir():
            if path.suffix == PARTIAL or (path.suffix == SUFFIX and path.name not in kept):
                path.unlink()

    def put(self, record: Record) -> Entry:
        """Write a record under the name of its content. It is part of no snapshot, and not durable, until `commit`.
        Raises `OSError`.
        """
        head = json.dumps({"name": record.name, "data": record.data})
        partial = self._path / f"record{PARTIAL}"
        try:
            save_file({key: tensor.contiguous() for key, tensor in record.tensors.items()}, partial, {"kedge": head})
        except SafetensorError as error:
            raise OSError(f"cannot write {partial}: {error}") from error
        with partial.open("rb+") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        path = self._path / f"{digest}{SUFFIX}"
        partial.replace(path)
        return Entry(record.name, path.name, path.stat().st_size)

    def _read(self, entry: Entry) -> Record:
        """Return the record in a snapshot's file, byte for byte as written. Raises `StateDamaged` and `OSError`."""
        path = self._path / entry.file
        with reading(path):
            size = path.stat().st_size if path.is_file() else None
            if size != entry.nbytes:
                found = "is missing" if size is None else f"has {size} bytes of {entry.nbytes}"
                raise StateDamaged("state", str(path), found)
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if path.name != digest + SUFFIX:
                raise StateDamaged("state", str(path), "has another content than its name says")
            with safe_open(path, "pt") as tensors:
                head = json.loads(tensors.metadata()["kedge"])
                if tuple(head["name"]) != entry.name:
                    raise StateDamaged("state", str(path), f"holds {head['name']!s:.200}, not {entry.name}")
                return Record(entry.name, head["data"], {key: tensors.get_tensor(key) for key in tensors.keys()})  # noqa: SIM118

    def has(self, entry: Entry) -> bool:
        """Return whether the file exists with its size. Its content is not read."""
        path = self._path / entry.file
        return path.is_file() and path.stat().st_size == entry.nbytes

    def commit(self, entries: Sequence[Entry]) -> None:
        """Make these entries the snapshot. Raises `OSError`."""
        body = {**self._head, "entries": [asdict(entry) for entry in entries]}
        content, path = json.dumps({**body, "sha256": _digest(body)}, indent=1).encode(), self._path / MANIFEST
        if not (path.is_file() and path.read_bytes() == content):
            self._force()
            partial = self._path / f"{MANIFEST}{PARTIAL}"
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            self._force()

    def _listed(self, damaged: list[Damage]) -> list[Entry]:
        """Return the entries of the manifest; none where it is missing or `damaged`. Raises `StateRefused`."""
        path = self._path / MANIFEST
        if not os.path.lexists(path):
            return []
        try:
            manifest = _manifest(path)
            with reading(path):
                for key, own in self._head.items():
                    theirs = manifest.get(key, own) if key == "dtype" else manifest[key]  # once, none was written
                    if theirs != own:
                        raise StateRefused(f"{MANIFEST}: {key}", theirs, _WHY[key].format(own))
                return [_entry(**one) for one in manifest["entries"]]
        except StateDamaged as damage:
            damaged.append(Damage(MANIFEST, (), damage.why))
            return []

    def _force(self) -> None:
        """Sync the folder, which makes renames durable."""
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def saved_dtype(folder: Path) -> str | None:
    """Return the dtype of the KV in a folder; None where that is not known."""
    with suppress(StateDamaged, OSError):  # nothing is saved yet, or opening the folder will raise the error
        return _manifest(folder / MANIFEST).get("dtype")
    return None


def _manifest(path: Path) -> dict[str, Any]:
    """Return what a manifest says. Raises `StateDamaged` and `OSError`."""
    with reading(path):
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        if manifest.pop("sha256") != _digest(manifest):
            raise StateDamaged("state", str(path), "is not what its checksum says")
        return manifest


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _entry(name: list[str], file: str, nbytes: int) -> Entry:
    sound = isinstance(name, list) and all(isinstance(part, str) for part in name) and type(nbytes) is int
    if not (sound and _FILE.fullmatch(file)):
        raise ValueError(f"no entry of a manifest: {name!r:.200} {file!r:.200} {nbytes!r:.200}")
    return Entry(tuple(name), file, nbytes)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of reading a damaged file into `StateDamaged`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DAMAGED_DISK:
            raise
        raise StateDamaged("state", str(path), f"cannot be read: {error}") from error
    except (SafetensorError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise StateDamaged("state", str(path), f"is malformed: {type(error).__name__}: {error!s:.200}") from error
