"""Snapshots of what the engine has learned: periodic, and one at the end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from kedge.engine.base import Engine
from kedge.errors import ConfigError, EngineClosed, StateRefused

logger = logging.getLogger(__name__)


class Saved(Protocol):
    """Summary of a saved or loaded snapshot."""

    @property
    def pools(self) -> int: ...
    @property
    def templates(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def damaged(self) -> Sequence[object]: ...


@runtime_checkable
class Saving(Protocol):
    """Engine whose state can be saved and loaded (`kedge.engine.local.engine.LocalEngine`)."""

    def save(self, folder: str | Path) -> Saved: ...
    def load(self, folder: str | Path) -> Saved: ...


class Snapshots:
    """Thread that saves an engine to a folder every `interval` seconds.

    A failure is logged and counted and does not end the server; the last complete snapshot is kept.
    """

    def __init__(self, engine: Engine, folder: Path, interval: float, count: Callable[[str], None]) -> None:
        """`count` counts outcomes by name. Raises `ConfigError` for an engine that cannot be saved."""
        if not isinstance(engine, Saving):
            raise ConfigError("server.state", str(folder), f"{type(engine).__name__} has no state to save")
        self._engine, self._folder, self._interval = engine, folder, interval
        self._count = count
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._every, name="kedge-snapshots", daemon=True)

    def load(self) -> None:
        """Load the saved state, if any. Raises `ConfigError` if the folder is not usable or in use by another process.

        Damaged files are moved aside, counted and logged, and the rest is loaded. State of another model or format is
        refused and logged; the server then starts with nothing learned, and the first snapshot moves that state away.
        """
        try:
            found = self._engine.load(self._folder)
            for _ in found.damaged:
                self._count("damaged")
            logger.info("loaded %s", _summary(found, self._folder))
        except StateRefused as refusal:
            self._count("refused")
            logger.error("starting with nothing learned, the saved state is refused: %s", refusal)
        except OSError as error:
            raise ConfigError("server.state", str(self._folder), f"cannot be used: {error}") from error

    def start(self) -> None:
        """Start the periodic snapshots."""
        self._thread.start()

    def end(self) -> None:
        """Take the last snapshot; return when it is saved."""
        if self._thread.is_alive():
            self._ending.set()
            self._thread.join()
            self._save()

    def _every(self) -> None:
        while not self._ending.wait(self._interval):
            self._save()

    def _save(self) -> None:
        try:
            saved = self._engine.save(self._folder)
        except EngineClosed:
            logger.warning("no snapshot: the engine has ended")
        except OSError as error:
            self._count("failed")
            logger.error("no snapshot: %s", error)
        else:
            self._count("saved")
            logger.info("saved %s", _summary(saved, self._folder))


def _summary(saved: Saved, folder: Path) -> str:
    size, took = saved.nbytes / 2**20, saved.seconds * 1e3
    return f"{saved.pools} pools and {saved.templates} templates, {size:.1f} MiB in {took:.0f} ms ({folder})"
