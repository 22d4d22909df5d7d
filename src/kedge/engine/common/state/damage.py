"""Damaged files of saved state: their description, and moving them aside."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

logger = logging.getLogger(__name__)
MARK = ".damaged-"
MAX_PUT_ASIDE = 16
"""Maximum damaged files that a folder keeps; the oldest are deleted."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged file of saved state, and what is lost by it."""

    file: str
    name: tuple[str, ...]
    """The pool or template that it held; empty for a manifest, and where it cannot be known"""
    reason: str
    replacement: str = ""
    """The content used instead, if any"""

    @property
    def lost(self) -> bool:
        """Whether the file's content has no replacement."""
        return not self.replacement

    def put_aside(self, folder: Path, *, rename: bool) -> None:
        """Log the damage and, if `rename`, give the file a name that is never read."""
        aside = _renamed(folder / self.file) if rename else None
        held = repr(" ".join(self.name)) if self.name else "what it lists or holds"
        cost = f"is taken from {self.replacement}" if self.replacement else "is lost"
        where = f"put aside as {aside}" if aside else "it was not put aside"
        logger.error("damaged state in %s: %s %s (%s); %s %s", folder, self.file, self.reason, where, held, cost)


def _renamed(path: Path) -> str | None:
    """Rename a damaged file. Returns its new name; None if there is no file, or it cannot be renamed."""
    target = path.with_name(f"{path.name}{MARK}{datetime.now(UTC):%Y%m%dT%H%M%S%f}")
    try:
        path.rename(target)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("cannot put %s aside: %s", path, error)
        return None
    return target.name


def forget_oldest(folder: Path) -> None:
    """Delete a folder's damaged files except for the last `MAX_PUT_ASIDE`."""
    aside = [path for path in folder.glob(f"*{MARK}*") if not path.is_dir()]
    for path in sorted(aside, key=lambda path: path.name.rpartition(MARK)[2])[:-MAX_PUT_ASIDE]:
        path.unlink(missing_ok=True)
