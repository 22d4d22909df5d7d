"""Rows of data sets: from a local JSONL file, or from the Hugging Face hub through `datasets` (extra `data`)."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.errors import ConfigError
from kedge.workloads.base import Question

Row = Mapping[str, Any]
UNAVAILABLE = "to download it, install `datasets` (pip install 'kedge[data]'); or give a file with --dataset"


@dataclass(frozen=True)
class DatasetSource:
    """A data set on the hub, with the function that converts a row into a question."""

    hub: str
    split: str
    question: Callable[[Row], Question]
    """Raises `KeyError`, `ValueError` or `TypeError` for a row of another data set."""
    config: str | None = None

    def questions(self, file: Path | None = None) -> list[Question]:
        """Return all questions of `file`, or of the hub if None, in their order.

        Raises `ConfigError` for an unreadable file, a row of another data set, or where `datasets` is missing or cannot
        load it.
        """
        rows = _of_hub(self) if file is None else _of_file(file)
        return [self._read(row, f"{file or self.hub}:{number}") for number, row in enumerate(rows, 1)]

    def require_available(self, file: Path | None) -> None:
        """Raise `ConfigError` for a file that does not exist, or without one where `datasets` is not installed."""
        if file is not None and not file.is_file():
            raise ConfigError("dataset", str(file), "no such file")
        if file is None and importlib.util.find_spec("datasets") is None:
            raise ConfigError("dataset", self.hub, UNAVAILABLE)

    def _read(self, row: Row, where: str) -> Question:
        try:
            return self.question(row)
        except (KeyError, ValueError, TypeError) as error:
            raise ConfigError("dataset", where, f"is not a row of {self.hub}: {error!r}") from error


def _of_file(file: Path) -> list[Row]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("dataset", str(file), str(error)) from error
    return [_parsed(line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def _parsed(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError("dataset", where, f"is not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError("dataset", where, "is not a JSON object")
    return row


def _of_hub(source: DatasetSource) -> list[Row]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("dataset", source.hub, UNAVAILABLE) from error
    try:
        return list(datasets.load_dataset(source.hub, source.config, split=source.split))
    except (OSError, ValueError) as error:
        raise ConfigError("dataset", source.hub, f"cannot be loaded: {error}") from error
