"""The lock of a folder that one process may use at a time."""

import fcntl
import logging
import os
import stat
from pathlib import Path

from kedge.errors import ConfigError

logger = logging.getLogger(__name__)


def lock_folder(path: Path, key: str, *, wait: bool = False) -> int:
    """Create a folder if missing, and lock it until the returned file descriptor is closed, or the process ends.

    If another process uses it, `wait` for that one, or raise `ConfigError` for `key`. Raises `OSError`.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_mode & stat.S_IWOTH:
        logger.warning("%s=%s: every user of this machine may write there, and what is read is believed", key, path)
    lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(key, str(path), "another process uses this folder") from None
    return lock
