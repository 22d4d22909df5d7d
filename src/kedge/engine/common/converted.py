"""The cache of converted GGUF files: a folder for each content and dtype, the least recently used ones removed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from time import time

from safetensors import SafetensorError

from kedge.engine.common.folder_lock import lock_folder
from kedge.errors import ConfigError, ModelNotFound

KEY = "KEDGE_CACHE"
PARTIAL = ".partial-"


def cache_folder() -> Path:
    """Return the folder of all copies: in `$KEDGE_CACHE`, or in `kedge` of the user's cache."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get(KEY) or home / "kedge").absolute() / "models"


def find_copy(file: Path, dtype: str) -> Path | None:
    """Return the folder of a converted file, and mark it as used now; None where there is none."""
    folder = cache_folder() / f"{_digest(file)[:16]}-{dtype}"
    with suppress(OSError):  # a cache of somebody else's may be read-only
        os.utime(folder)
    return folder if folder.is_dir() else None


def known_copies(file: Path) -> list[Path]:
    """Return the folders of a converted file in all dtypes, if its content is known without reading it."""
    digest = _known(file)
    found = cache_folder().glob(f"{digest[:16]}-*") if digest else ()
    return sorted(folder for folder in found if PARTIAL not in folder.name)


def make_copy(file: Path, dtype: str, write: Callable[[Path], None], max_bytes: int = 32 << 30) -> Path:
    """Return the folder of a converted file, which `write` fills unless another process has.

    Others are removed, the least recently used first, until all have at most `max_bytes`. Raises what `write` raises,
    and `ConfigError` for a cache without room or that cannot be written.
    """
    root = cache_folder()
    try:
        lock = lock_folder(root, KEY, wait=True)
    except OSError as error:
        raise ConfigError(KEY, str(root), f"cannot be written: {error}") from error
    try:
        if found := find_copy(file, dtype):
            return found
        for left in root.glob(f"*{PARTIAL}*"):  # nobody else writes: whoever began them is gone
            shutil.rmtree(left, ignore_errors=True)
        folder = root / f"{_digest(file)[:16]}-{dtype}"
        partial = Path(mkdtemp(prefix=f"{folder.name}{PARTIAL}", dir=root))
        try:
            write(partial)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        _shrink(root, folder, max_bytes)
        return folder
    except (OSError, SafetensorError) as error:
        raise ConfigError(KEY, str(root), f"a converted copy of {file} cannot be written there: {error}") from error
    finally:
        os.close(lock)


def _shrink(root: Path, newest: Path, max_bytes: int, spared_s: float = 3600) -> None:
    """Remove copies. Those used in the last hour stay: a process may be about to load them. Afterwards its system keeps
    what it has mapped.
    """
    sizes = {path: sum(file.stat().st_size for file in path.iterdir()) for path in root.iterdir() if path.is_dir()}
    ages = {path: time() - path.stat().st_mtime for path in sizes.keys() - {newest}}
    for path in sorted(ages, key=lambda path: -ages[path]):
        if sum(sizes.values()) > max_bytes and ages[path] > spared_s:
            shutil.rmtree(path, ignore_errors=True)
            del sizes[path]


def _index() -> dict[str, list]:
    try:
        return dict(json.loads((cache_folder() / "files.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # none yet, or damaged: files are hashed again
        return {}


def _known(file: Path) -> str | None:
    """Return the digest of a file's content, if it was hashed before and has not changed since."""
    stat, entry = file.stat(), _index().get(str(file.resolve()))
    return str(entry[2]) if entry and entry[:2] == [stat.st_size, stat.st_mtime_ns] else None


def _digest(file: Path) -> str:
    """Return the SHA-256 of a file's content, and remember it with the file's size and time."""
    try:
        if known := _known(file):
            return known
        stat = file.stat()
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise ModelNotFound("model", str(file), f"cannot be read: {error}") from error
    root, entries = cache_folder(), {path: entry for path, entry in _index().items() if Path(path).exists()}
    entries[str(file.resolve())] = [stat.st_size, stat.st_mtime_ns, digest]
    with suppress(OSError):  # then it is hashed at the next start, too
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = root / f"files.json.{os.getpid()}"
        fresh.write_text(json.dumps(entries), encoding="utf-8")
        fresh.replace(root / "files.json")
    return digest
