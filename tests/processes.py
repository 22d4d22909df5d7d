"""What Linux says of processes, for tests of what is left behind when one ends."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel cannot be asked to")


def is_alive(pid: int) -> bool:
    """Return whether a process is there and has not ended."""
    return any(one == pid for one, _ in _alive())


def children(pid: int) -> list[int]:
    """Return the living processes that a process has started."""
    return [one for one, parent in _alive() if parent == pid]


def _alive() -> Iterator[tuple[int, int]]:
    """Every process with its parent, those apart that nobody has waited for yet."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = file.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        if state not in "ZX":
            yield int(file.parent.name), int(parent)
