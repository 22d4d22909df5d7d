"""The files of saved state: records, named after their content, and manifests, which list records.

A damaged file raises `StateDamaged`; sound state of another model or format raises `StateRefused`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kedge.anchors.saving import Record
from kedge.errors import StateDamaged, StateRefused

FORMAT = 2
MANIFEST, PREVIOUS = "manifest.json", "manifest.previous.json"
SUFFIX, PARTIAL = ".safetensors", ".part"
MAX_MANIFEST_BYTES = 64 << 20
Name = tuple[str, ...]
_FILE = re.compile(rf"[0-9a-f]{{64}}{re.escape(SUFFIX)}")
_DAMAGED_DISK = frozenset({errno.ENOENT, errno.EISDIR, errno.EIO, errno.EBADMSG, errno.ELOOP})
"""Errors that mean a damaged file, as opposed to a problem of this process or its permissions"""


def identity_of(parts: Mapping[str, object]) -> str:
    """Return an identity of named parts, plain data each, so that a refusal can name those that differ."""
    return json.dumps(parts, sort_keys=True)


def differences(theirs: object, ours: str) -> tuple[str, object, object]:
    """Return the names of the parts in which two identities differ, with both values of each. Identities without parts
    differ as a whole.
    """
    saved, own = _parts(theirs), _parts(ours)
    names = sorted(name for name in own.keys() | saved.keys() if saved.get(name) != own.get(name))
    if not (saved and own and names):
        return "identity", theirs, ours
    return ", ".join(names), [saved.get(name) for name in names], [own.get(name) for name in names]


def _parts(identity: object) -> Mapping[str, object]:
    try:
        parts = json.loads(identity) if isinstance(identity, str) else None
    except ValueError:
        return {}
    return parts if isinstance(parts, dict) else {}


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a snapshot, with the name of its content."""

    name: Name
    file: str
    nbytes: int


# manifests ------------------------------------------------------------------------------------------------------------


def manifest_of(entries: Sequence[Entry], identity: str) -> bytes:
    """Return the content of a manifest, including its own SHA-256."""
    body = {"format": FORMAT, "identity": identity, "entries": [asdict(entry) for entry in entries]}
    return json.dumps({**body, "sha256": _digest(body)}, indent=1).encode()


def read_manifest(path: Path, identity: str) -> list[Entry]:
    """Return the entries of a manifest. Raises `StateDamaged`, `StateRefused`, and `OSError`."""
    if _size(path) > MAX_MANIFEST_BYTES:
        raise StateDamaged("state", str(path), f"is larger than {MAX_MANIFEST_BYTES} bytes")
    with making_sense(path):
        manifest = json.loads(path.read_bytes())
        body = {key: value for key, value in manifest.items() if key != "sha256"}
        if manifest.get("sha256", _digest(body)) != _digest(body):  # those of version 0.1 have none
            raise StateDamaged("state", str(path), "is not what its checksum says")
        _check_owner(manifest, path, identity)
        return [_entry(**one) for one in manifest["entries"]]


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _entry(name: list[str], file: str, nbytes: int) -> Entry:
    sound = isinstance(name, list) and all(isinstance(part, str) for part in name) and type(nbytes) is int
    if not (sound and _FILE.fullmatch(file)):
        raise ValueError(f"no entry of a manifest: {name!r:.200} {file!r:.200} {nbytes!r:.200}")
    return Entry(tuple(name), file, nbytes)


def _check_owner(head: Mapping[str, Any], path: Path, identity: str) -> None:
    if head["format"] != FORMAT:
        raise StateRefused(f"{path.name}: format", head["format"], f"this engine has {FORMAT!r}")
    if head["identity"] != identity:
        names, theirs, ours = differences(head["identity"], identity)
        raise StateRefused(f"{path.name}: {names}", theirs, f"this engine has {ours!r}")


# records --------------------------------------------------------------------------------------------------------------


def write_record(folder: Path, record: Record, identity: str) -> Entry:
    """Write a record under the name of its content. It is durable once the folder is synced. Raises `OSError`."""
    head = {"format": FORMAT, "identity": identity, "name": record.name, "data": record.data}
    partial = folder / f"record{PARTIAL}"
    tensors = {key: tensor.contiguous() for key, tensor in record.tensors.items()}
    try:
        save_file(tensors, partial, {"kedge": json.dumps(head)})
    except SafetensorError as error:
        raise OSError(f"cannot write {partial}: {error}") from error
    with partial.open("rb+") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    path = folder / f"{digest}{SUFFIX}"
    partial.replace(path)
    return Entry(record.name, path.name, path.stat().st_size)


def read_record(folder: Path, entry: Entry, identity: str) -> Record:
    """Return the record in a snapshot's file, byte for byte as written. Raises `StateDamaged` and `OSError`."""
    path = folder / entry.file
    if (size := _size(path)) != entry.nbytes:
        raise StateDamaged("state", str(path), f"has {size} bytes of {entry.nbytes}")
    with making_sense(path):
        _check_content(path)
        with safe_open(path, "pt") as file:
            head, name = _head(file.metadata(), path, identity), entry.name
            if tuple(head["name"]) != name:
                raise StateDamaged("state", str(path), f"holds {head['name']!s:.200}, not {name}")
            return Record(name, head["data"], {key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118


def _check_content(path: Path) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if path.name != digest + SUFFIX:
        raise StateDamaged("state", str(path), "has another content than its name says")


def _head(metadata: Mapping[str, str], path: Path, identity: str) -> Mapping[str, Any]:
    head: Mapping[str, Any] = json.loads(metadata["kedge"])
    _check_owner(head, path, identity)
    return head


def entry_of_file(path: Path, identity: str) -> Entry:
    """Return the entry of a record's file from its own header. Raises `StateDamaged`, `StateRefused`, and `OSError`."""
    size = _size(path)
    with making_sense(path):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        try:
            head = _head(metadata, path, identity)
        except StateRefused:
            _check_content(path)  # a damaged header is not another engine's record
            raise
        return _entry(head["name"], path.name, size)


# what can be wrong with a file ----------------------------------------------------------------------------------------


def _size(path: Path) -> int:
    """Return the size of a regular file. Raises `StateDamaged` if there is none, and `OSError`."""
    with making_sense(path):
        status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise StateDamaged("state", str(path), "is no regular file")
    return status.st_size


@contextmanager
def making_sense(path: Path) -> Iterator[None]:
    """Turn errors of reading a damaged file into `StateDamaged`."""
    try:
        yield
    except FileNotFoundError as error:
        raise StateDamaged("state", str(path), "is missing") from error
    except OSError as error:
        if error.errno not in _DAMAGED_DISK:
            raise
        raise StateDamaged("state", str(path), f"cannot be read: {error}") from error
    except (SafetensorError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise StateDamaged("state", str(path), f"makes no sense: {type(error).__name__}: {error!s:.200}") from error
