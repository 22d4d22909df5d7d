"""The lock of a folder that one process may use at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kedge.errors import ConfigError


def lock_folder(path: Path, key: str) -> int:
    """Create a folder if missing, and lock it until the returned file descriptor is closed, or the process ends.

    Raises `ConfigError` for `key` if another process uses it, and `OSError`.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(key, str(path), "another process uses this folder") from None
    return lock
