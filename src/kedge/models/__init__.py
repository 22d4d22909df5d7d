"""The bundled models, by name."""

from __future__ import annotations

from pathlib import Path

NANO = "nano"
"""The default: the bundled tasks, with the role first"""
NANO_BOTH = "nano-both"
"""The same tasks and `tools`, with the role first or last"""
BUNDLED = (NANO, NANO_BOTH)


def bundled(name: str | Path) -> Path | None:
    """Return the folder of the bundled model of this name; None for another name, and where there is such a folder
    here.
    """
    return _folder(str(name)) if str(name) in BUNDLED and not Path(name).exists() else None


def default_model() -> Path:
    """Return the folder of the bundled model that stands for no model."""
    return _folder(NANO)


def _folder(name: str) -> Path:
    return Path(__file__).with_name(name)
