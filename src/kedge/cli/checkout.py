"""The repository's `benchmarks/`, which only a checkout has: beside the package's source, or in the current folder."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from kedge.errors import ConfigError

COMMANDS = ("ttft", "workflow", "guard", "accuracy")
"""Commands of `kedge bench` that are there alone."""
VLLM_CASES = ("no-hints", "no-pressure", "flows", "peer", "sessions", "team")
"""Cases of `kedge bench vllm` that are there alone."""


def is_there() -> bool:
    """Return whether there is a checkout."""
    return _root() is not None


def benchmarks(module: str, option: str, value: str) -> ModuleType:
    """Import a module of `benchmarks`; `option` and `value` are what was asked for.

    Raises `ConfigError` outside a checkout.
    """
    root = _root()
    if root is None:
        raise ConfigError(option, value, "is in benchmarks/ of Kedge's repository: run it in a checkout")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module(f"benchmarks.{module}")


def _root() -> Path | None:
    for folder in (Path(__file__).parents[3], Path.cwd()):
        if (folder / "benchmarks" / "cli.py").is_file() and (folder / "src" / "kedge" / "cli").is_dir():
            return folder
    return None
