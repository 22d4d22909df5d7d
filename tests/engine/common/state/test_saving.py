"""When state is saved: failures are counted and end nothing, and what is not worth keeping is not kept."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest

from kedge.engine.common.state import saving
from kedge.engine.common.state.saving import Snapshots
from kedge.engine.common.state.snapshot import SavedState
from kedge.errors import ConfigError, StateRefused

PATIENCE = 60.0


class Folder:
    """Stands for a state folder; what `fails` is raised by the next calls."""

    def __init__(self, *, is_trusted: bool = True) -> None:
        self.counted: Counter[str] = Counter()
        self.is_trusted, self.closes = is_trusted, 0
        self.fails: Exception | None = None
        self.saved = threading.Event()
        self.snapshots = Snapshots(Path("folder"), self.load, self.save, count=self.count, give_back=self.close)

    def count(self, outcome: str) -> None:
        self.counted[outcome] += 1

    def save(self) -> SavedState | None:
        self.saved.set()
        return self.load() if self.is_trusted else None

    def load(self) -> SavedState:
        if self.fails:
            raise self.fails
        return SavedState(1, 2, 3, 4, 0.5)

    def close(self) -> None:
        self.closes += 1


def test_failures_are_counted_and_the_thread_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "SNAPSHOT_SECONDS", 0.001)
    folder = Folder()
    folder.fails = OSError("full")
    folder.snapshots.start()
    for _ in range(3):
        folder.saved.clear()
        assert folder.saved.wait(PATIENCE)
    folder.fails = None
    folder.snapshots.close()
    assert folder.counted["failed"] >= 2 and folder.counted["saved"] >= 1


@pytest.mark.parametrize("is_trusted", [True, False])
def test_the_end_is_saved_once_if_it_is_worth_keeping(is_trusted: bool) -> None:
    folder = Folder(is_trusted=is_trusted)
    folder.snapshots.start()
    folder.snapshots.close()
    folder.snapshots.close()
    assert (folder.counted, folder.closes) == ({"saved": 1} if is_trusted else {}, 1)


def test_what_a_start_can_find() -> None:
    folder = Folder()
    assert folder.snapshots.load() and not folder.counted
    folder.fails = StateRefused("manifest.json: ranks", [2], "this engine has [1]")
    assert not folder.snapshots.load() and folder.counted == {"refused": 1}
    folder.fails = PermissionError("no")
    with pytest.raises(ConfigError, match="cannot be used: no"):
        folder.snapshots.load()
