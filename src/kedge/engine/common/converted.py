"""The cache of converted GGUF files: a folder for each file and dtype, until somebody removes it."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

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
    """Return the folder of a converted file; None where there is none."""
    folder = cache_folder() / f"{_key(file)}-{dtype}"
    return folder if folder.is_dir() else None


def known_copies(file: Path) -> list[Path]:
    """Return the folders of a converted file in all dtypes."""
    return sorted(folder for folder in cache_folder().glob(f"{_key(file)}-*") if PARTIAL not in folder.name)


def make_copy(file: Path, dtype: str, write: Callable[[Path], None]) -> Path:
    """Return the folder of a converted file, which `write` fills unless another process has. Raises what `write`
    raises, and `ConfigError` for a cache without room or that cannot be written.
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
        folder = root / f"{_key(file)}-{dtype}"
        partial = Path(mkdtemp(prefix=f"{folder.name}{PARTIAL}", dir=root))
        try:
            write(partial)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return folder
    except (OSError, SafetensorError) as error:
        raise ConfigError(KEY, str(root), f"a converted copy of {file} cannot be written there: {error}") from error
    finally:
        os.close(lock)


def _key(file: Path) -> str:
    """Return a name of a file as it is now: another path, size or time of change is another file."""
    try:
        stat = file.stat()
    except OSError as error:
        raise ModelNotFound("model", str(file), f"cannot be read: {error}") from error
    return hashlib.sha256(f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
