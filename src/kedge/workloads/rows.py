"""Rows of data sets: JSONL files, whose errors name the line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from kedge.errors import ConfigError

Row = Mapping[str, Any]
Item = TypeVar("Item")


def read_rows(file: Path, convert: Callable[[Row], Item], source: str) -> list[Item]:
    """Convert all rows of a JSONL file, in their order; `source` is the data set's name.

    `convert` raises `KeyError`, `ValueError` or `TypeError` for a row of another data set. Raises `ConfigError` for
    that, and for an unreadable file.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # `splitlines` also splits at characters within a text
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("dataset", str(file), str(error)) from error
    numbered = ((line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line.strip())
    return [converted(_parsed(line, where), convert, where, source) for line, where in numbered]


def converted(row: Row, convert: Callable[[Row], Item], where: str, source: str) -> Item:
    """Convert one row. Raises `ConfigError` as `read_rows` does."""
    try:
        return convert(row)
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError("dataset", where, f"is not a row of {source}: {error!r}") from error


def _parsed(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError("dataset", where, f"is not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError("dataset", where, "is not a JSON object")
    return row
