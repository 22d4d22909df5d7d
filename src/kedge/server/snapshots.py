"""Snapshots of what the engine has learned: one now and then, one at the end, off the paths of requests."""

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
    """What a snapshot holds, or what was loaded of one."""

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
    """An engine whose state can be saved and loaded (`kedge.engine.local.engine.LocalEngine`)."""

    def save(self, folder: str | Path) -> Saved: ...
    def load(self, folder: str | Path) -> Saved: ...


class Snapshots:
    """Saves an engine to a folder every `interval` seconds, in a thread of its own.

    Nothing that goes wrong with a snapshot ends the server: it is logged and counted, and the last complete one stays.
    """

    def __init__(self, engine: Engine, folder: Path, interval: float, count: Callable[[str], None]) -> None:
        """Raises `ConfigError` for an engine that cannot be saved."""
        if not isinstance(engine, Saving):
            raise ConfigError("server.state", str(folder), f"{type(engine).__name__} has no state to save")
        self._engine, self._folder, self._interval = engine, folder, interval
        self._count = count
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._every, name="kedge-snapshots", daemon=True)

    def load(self) -> None:
        """Load what is there. Raises `ConfigError` where the folder cannot be used, or another process does.

        What is damaged is put aside, counted and logged file by file, and the rest is loaded. State of another model or
        format is refused and logged; the server then starts with nothing learned, and the first snapshot moves it away.
        """
        try:
            found = self._engine.load(self._folder)
            for _ in found.damaged:
                self._count("damaged")
            logger.info("loaded %s", _told(found, self._folder))
        except StateRefused as refusal:
            self._count("refused")
            logger.error("starting with nothing learned, the saved state is refused: %s", refusal)
        except OSError as error:
            raise ConfigError("server.state", str(self._folder), f"cannot be used: {error}") from error

    def start(self) -> None:
        """Begins to save."""
        self._thread.start()

    def end(self) -> None:
        """The last snapshot; returns when it is done."""
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
            logger.info("saved %s", _told(saved, self._folder))


def _told(saved: Saved, folder: Path) -> str:
    size, took = saved.nbytes / 2**20, saved.seconds * 1e3
    return f"{saved.pools} pools and {saved.templates} templates, {size:.1f} MiB in {took:.0f} ms ({folder})"
