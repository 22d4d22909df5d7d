"""What an engine has learned, in a folder that survives the process, and its last moment.

    manifest.json           format, identity of the model, and the files of the last complete snapshot
    <sha256>.safetensors    one pool, or one template's prefix segments; named after its content
    lock                    held by the process that has the folder
    refused-<n>/            what lay here for another model or format, put aside by the first save

Every file is written under another name, forced to the disk, and renamed; the manifest last of all. So at any moment
the manifest names whole files only, and a process that is killed leaves the last complete snapshot behind.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kedge.anchors.base_store import BaseStore
from kedge.anchors.saving import Record, names, restored, view
from kedge.anchors.store import AnchorStore
from kedge.config import AnchorSettings
from kedge.engine.local.model import HFTokenizer, ModelRunner
from kedge.errors import ConfigError, StateRefused
from kedge.kv.segment import KVSegment
from kedge.kv.spec import KVSpec

logger = logging.getLogger(__name__)
FORMAT = 2
MANIFEST, SUFFIX, PARTIAL = "manifest.json", ".safetensors", ".part"
TRIES = 8
"""Views of a pool that is learning before a snapshot goes on with the one that it has of it."""
SAMPLED = 64
"""Elements of every weight that go into a model's identity."""
_CHANCE = frozenset({"_name_or_path", "dtype", "transformers_version"})
"""Entries of a config that say nothing of the model"""
T = TypeVar("T")
Name = tuple[str, ...]


class AskLearned(Protocol):
    """Asks the engine's thread something about what it has learned."""

    def __call__(self, question: Callable[[AnchorStore, BaseStore], T]) -> T: ...


@dataclass(frozen=True, slots=True)
class SavedState:
    """What a snapshot holds."""

    pools: int
    templates: int
    nbytes: int
    """On the disk"""
    seconds: float


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a snapshot and what is in it."""

    name: Name
    file: str
    nbytes: int


class EngineState:
    """One engine's state in one folder. Any thread may call; `ask` leads to the engine's."""

    def __init__(
        self, folder: Path, runner: ModelRunner, tokenizer: HFTokenizer, anchors: AnchorSettings, ask: AskLearned
    ) -> None:
        """Raises `ConfigError` where another process has the folder, and `OSError`."""
        self.folder = folder
        self._files = StateFolder(folder, identity(runner, tokenizer, anchors))
        self._like = _no_tokens(runner.spec, runner.device)
        self._ask, self._lock = ask, threading.Lock()
        self._written: dict[Name, tuple[Hashable, Entry]] = {}
        """What is in the folder, with the signature of the view that it was made from"""

    def save(self) -> SavedState:
        """A snapshot of what is learned now, see `LocalEngine.save`."""
        began = time.monotonic()
        with self._lock:
            made = {name: self._saved(name) for name in self._ask(names)}
            self._written = {name: one for name, one in made.items() if one}
            entries = [entry for _, entry in self._written.values()]
            self._files.commit(entries)
        return _summary(entries, began)

    def load(self) -> SavedState:
        """What the last complete snapshot holds is what the engine knows, see `LocalEngine.load`."""
        began = time.monotonic()
        with self._lock:
            entries = self._files.entries()
            records = map(self._files.read, entries)
            learned = self._ask(lambda anchors, _: anchors)
            found = restored(records, learned, self._like)
            self._ask(found.install)
            self._written.clear()
        return _summary(entries, began)

    def close(self) -> None:
        """Gives the folder back."""
        with self._lock:
            self._files.close()

    def _saved(self, name: Name) -> tuple[Hashable, Entry] | None:
        """The entry of what has this name, written only if it has changed; None where it has gone."""
        before = self._written.get(name)
        for _ in range(TRIES):
            now = self._ask(lambda anchors, bases: view(anchors, bases, name))
            if now is None:
                return None
            if before and before[0] == now.signature:
                return before
            if record := now.record():
                return now.signature, self._files.put(record)
        logger.warning("%s learns faster than it is copied; the snapshot has it as it was before", name)
        return before


def _summary(entries: Sequence[Entry], began: float) -> SavedState:
    pools = sum(entry.name[0] == "pool" for entry in entries)
    nbytes = sum(entry.nbytes for entry in entries)
    return SavedState(pools, len(entries) - pools, nbytes, time.monotonic() - began)


def _no_tokens(spec: KVSpec, device: torch.device) -> KVSegment:
    empty = torch.empty(spec.layers, 0, spec.kv_heads, spec.head_dim, dtype=spec.dtype, device=device)
    return KVSegment(empty, empty)


# whose state it is ----------------------------------------------------------------------------------------------------


def identity(runner: ModelRunner, tokenizer: HFTokenizer, anchors: AnchorSettings) -> str:
    """A digest of everything that saved KV depends on: config, every weight's name, shape, dtype and a sample of its
    elements, tokenizer, and the settings of how values are compared.
    """
    digest = hashlib.sha256()
    config = {k: v for k, v in runner.model.config.to_dict().items() if k not in _CHANCE}
    _add(digest, {"config": config, "kv": asdict(runner.spec)})
    for name, weight in sorted(runner.model.state_dict().items()):
        _add(digest, [name, list(weight.shape), str(weight.dtype)])
        flat = weight.detach().flatten()
        digest.update(flat[:: max(1, flat.numel() // SAMPLED)].float().cpu().numpy().tobytes())
    inner = tokenizer.inner
    _add(digest, [inner.get_vocab(), inner.special_tokens_map, inner.chat_template])
    compared = ("estimator", "match_layer", "match_dim", "top_k", "tau", "temperature")
    _add(digest, anchors.model_dump(include=set(compared)))
    return digest.hexdigest()


def _add(digest: Any, data: object) -> None:
    digest.update(json.dumps(data, sort_keys=True, default=str).encode())


# files ----------------------------------------------------------------------------------------------------------------


class StateFolder:
    """A folder of records that belong to one identity. Made where there is none, and locked until it is closed."""

    def __init__(self, path: Path, identity: str) -> None:
        """Raises `ConfigError` where another process has it, and `OSError`."""
        path.mkdir(parents=True, exist_ok=True)
        self._path, self._identity, self._is_ours = path, identity, False
        self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigError("state", str(path), "another process uses this folder") from None

    def close(self) -> None:
        os.close(self._lock)

    def entries(self) -> list[Entry]:
        """The files of the last complete snapshot; none where there never was one. Raises `StateRefused`."""
        try:
            manifest = json.loads((self._path / MANIFEST).read_bytes())
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise StateRefused("state", str(self._path), f"its {MANIFEST} is damaged: {error}") from error
        with _making_sense(self._path / MANIFEST):
            self._check(manifest, MANIFEST)
            return [Entry(tuple(one["name"]), str(one["file"]), int(one["nbytes"])) for one in manifest["entries"]]

    def read(self, entry: Entry) -> Record:
        """What a file of the snapshot holds. Raises `StateRefused`."""
        path = self._path / entry.file
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            raise StateRefused("state", str(path), f"is missing, though {MANIFEST} names it") from None
        if path.name != digest + SUFFIX:
            raise StateRefused("state", str(path), "is damaged: its content is not what its name says")
        return self._parsed(path, entry)

    def _parsed(self, path: Path, entry: Entry) -> Record:
        with _making_sense(path), safe_open(path, "pt") as file:
            head = json.loads(file.metadata()["kedge"])
            self._check(head, path.name)
            if tuple(head["name"]) != entry.name:
                raise StateRefused("state", str(path), f"is {head['name']}, and {MANIFEST} says {entry.name}")
            return Record(entry.name, head["data"], {key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118

    def _check(self, head: Mapping[str, Any], file: str) -> None:
        for key, ours in (("format", FORMAT), ("identity", self._identity)):
            if head[key] != ours:
                raise StateRefused(f"{file}: {key}", head[key], f"this engine has {ours!r}")

    def put(self, record: Record) -> Entry:
        """Writes a record, which belongs to no snapshot before `commit`. Raises `OSError`."""
        self._claim()
        head = {"format": FORMAT, "identity": self._identity, "name": record.name, "data": record.data}
        partial = self._path / f"record{PARTIAL}"
        tensors = {key: tensor.contiguous() for key, tensor in record.tensors.items()}
        try:
            save_file(tensors, partial, {"kedge": json.dumps(head)})
        except SafetensorError as error:
            raise OSError(f"cannot write {partial}: {error}") from error
        with partial.open("rb+") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        path = self._path / f"{digest}{SUFFIX}"
        partial.replace(path)
        return Entry(record.name, path.name, path.stat().st_size)

    def commit(self, entries: Sequence[Entry]) -> None:
        """These are the snapshot from now on; files that do not belong to it go. Raises `OSError`."""
        self._claim()
        manifest = {"format": FORMAT, "identity": self._identity, "entries": [asdict(entry) for entry in entries]}
        content = json.dumps(manifest, indent=1).encode()
        if not self._says(content):
            self._force()
            self._write(MANIFEST, content)
            self._force()
        kept = {entry.file for entry in entries}
        for path in self._path.iterdir():
            if path.suffix == PARTIAL or (path.suffix == SUFFIX and path.name not in kept):
                path.unlink()

    def _says(self, content: bytes) -> bool:
        path = self._path / MANIFEST
        return path.exists() and path.read_bytes() == content

    def _write(self, name: str, content: bytes) -> None:
        partial = self._path / f"{name}{PARTIAL}"
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._path / name)

    def _force(self) -> None:
        """Renames are on the disk once the folder is."""
        folder = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _claim(self) -> None:
        """Before the first write: what another model or format left here is put aside."""
        if self._is_ours:
            return
        try:
            self.entries()
        except StateRefused as refusal:
            self._put_aside(refusal)
        self._is_ours = True

    def _put_aside(self, refusal: StateRefused) -> None:
        number = sum(path.name.startswith("refused-") for path in self._path.iterdir()) + 1
        aside = self._path / f"refused-{number}"
        aside.mkdir()
        for path in [*self._path.glob(f"*{SUFFIX}"), self._path / MANIFEST]:
            path.rename(aside / path.name)
        logger.warning("state that cannot be used is put aside to %s: %s", aside, refusal)


@contextmanager
def _making_sense(path: Path) -> Iterator[None]:
    """Whatever a file that parses can still be wrong in is a refusal."""
    try:
        yield
    except (SafetensorError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise StateRefused("state", str(path), f"makes no sense: {error!r}") from error
