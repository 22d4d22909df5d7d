"""When what was learned is loaded and saved: at the start, every minute, and at the end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kedge.errors import ConfigError, EngineClosed, StateRefused

if TYPE_CHECKING:
    from kedge.engine.common.state.snapshot import SavedState

logger = logging.getLogger(__name__)
SNAPSHOT_SECONDS = 60.0
"""Time between two snapshots: what a crash loses is learned again within as much."""


class Snapshots:
    """Thread that saves a state to its folder.

    A failure is logged and counted and ends nothing; the last complete snapshot is kept.
    """

    def __init__(
        self,
        folder: Path,
        load: Callable[[], SavedState],
        save: Callable[[], SavedState | None],
        key: str = "state",
        count: Callable[[str], None] = lambda _: None,
        give_back: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin without snapshots. `save` returns None where nothing is worth keeping. `key` is the setting's name.
        `count` is called with outcomes: saved, failed, refused or damaged. `give_back` is called at the end.
        """
        self._folder, self._key, self._count = folder, key, count
        self._load_state, self._save_state, self._give_back = load, save, give_back
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._every, name="kedge-snapshots", daemon=True)

    def load(self) -> bool:
        """Load the saved state. Returns whether it had anything.

        Damaged files are counted and logged, and the rest is loaded. State of another model, format or rank is refused
        and logged; the first snapshot moves it away. Raises `ConfigError` if the folder is not usable or in use by
        another process.
        """
        try:
            found = self._load_state()
        except StateRefused as refusal:
            self._count("refused")
            logger.error("starting with nothing learned, the saved state is refused: %s", refusal)
            return False
        except OSError as error:
            raise ConfigError(self._key, str(self._folder), f"cannot be used: {error}") from error
        for _ in found.damaged:
            self._count("damaged")
        logger.info("loaded %s", _summary(found, self._folder))
        return found.pools + found.templates + found.values > 0

    def start(self) -> None:
        """Start the periodic snapshots."""
        self._thread.start()

    def close(self) -> None:
        """Take the last snapshot, if it was started; return when it is saved. Idempotent."""
        if self._ending.is_set():
            return
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()
            self._save()
        self._give_back()

    def _every(self) -> None:
        while not self._ending.wait(SNAPSHOT_SECONDS):
            self._save()

    def _save(self) -> None:
        try:
            saved = self._save_state()
        except EngineClosed:
            logger.warning("no snapshot: the engine has ended")
        except Exception:  # whatever it is, the engine goes on and the snapshot before stays
            self._count("failed")
            logger.exception("no snapshot of what was learned")
        else:
            if saved:
                self._count("saved")
                logger.info("saved %s", _summary(saved, self._folder))


def _summary(state: SavedState, folder: Path) -> str:
    counts = f"{state.pools} pools, {state.templates} templates and {state.values} values"
    return f"{counts}, {state.nbytes / 2**20:.1f} MiB in {state.seconds * 1e3:.0f} ms ({folder})"
