"""What one rank has learned, kept in a folder: loaded at the start, written by a thread of its own and at the end."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kedge.engine.common.state.snapshot import SavedState
from kedge.errors import ConfigError, StateRefused

logger = logging.getLogger(__name__)
OUTCOMES = ("saved", "failed", "refused", "damaged")
"""What is counted: snapshots that were written, or could not be; state of another model; damaged files"""


class SavesState(Protocol):
    """State in a folder, see `EngineState`."""

    @property
    def folder(self) -> Path: ...

    def save(self) -> SavedState: ...

    def load(self) -> SavedState: ...

    def close(self) -> None: ...


class RankState:
    """The saved state of one rank, or of the guard beside them. Its thread holds up a step only while it looks at what
    there is to be written.

    A snapshot that fails is logged and counted, and the one before stays.
    """

    def __init__(self, state: SavesState, interval: float, is_trusted: Callable[[], bool]) -> None:
        """Write every `interval` seconds what `state` asks for, where `is_trusted` returns that it is worth keeping."""
        self._state, self._interval, self._is_trusted = state, interval, is_trusted
        self._outcomes: Counter[str] = Counter()
        self._lock, self._ending = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._every, name="kedge-state", daemon=True)

    def load(self) -> bool:
        """Load the last snapshot. Returns whether it had anything.

        Damaged files are moved aside, counted and logged, and the rest is loaded; state of another model, or of another
        rank, is refused, and the first snapshot moves it away. Raises `ConfigError` where the folder cannot be used.
        """
        try:
            found = self._state.load()
        except StateRefused as refusal:
            self._count("refused")
            logger.error("kedge: nothing is learned yet, the saved state is refused: %s", refusal)
            return False
        except OSError as error:
            raise ConfigError("state", str(self._state.folder), f"cannot be used: {error}") from error
        self._count("damaged", len(found.damaged))
        logger.info("kedge: loaded %s", _summary(found, self._state.folder))
        return found.pools + found.templates + found.values > 0

    def start(self) -> None:
        """Start the thread that writes snapshots."""
        self._thread.start()

    def close(self) -> None:
        """Write the last snapshot, and give the folder back. Idempotent."""
        if self._ending.is_set():
            return
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()
        self.save()
        self._state.close()

    def take_outcomes(self) -> dict[str, int]:
        """Return what was counted since the last call, by the names of `OUTCOMES`."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, Counter()
        return dict(outcomes)

    def save(self) -> None:
        """Write a snapshot, if there is anything that is trusted."""
        if not self._is_trusted():
            return
        try:
            saved = self._state.save()
        except Exception:  # whatever it is, the engine goes on and the snapshot before stays
            self._count("failed")
            logger.exception("kedge: no snapshot of what was learned")
        else:
            self._count("saved")
            logger.debug("kedge: saved %s", _summary(saved, self._state.folder))

    def _every(self) -> None:
        while not self._ending.wait(self._interval):
            self.save()

    def _count(self, outcome: str, times: int = 1) -> None:
        if times:
            with self._lock:
                self._outcomes[outcome] += times


def _summary(state: SavedState, folder: Path) -> str:
    counts = f"{state.pools} pools, {state.templates} templates and {state.values} values"
    return f"{counts}, {state.nbytes / 2**20:.1f} MiB in {state.seconds * 1e3:.0f} ms ({folder})"
