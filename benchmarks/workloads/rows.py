"""Rows of data sets: from a local JSONL file, or from the Hugging Face hub through `datasets` (extra `data`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kedge.errors import ConfigError
from kedge.workloads.base import Question
from kedge.workloads.rows import Row, converted, read_rows

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
        if file is not None:
            return read_rows(file, self.question, self.hub)
        numbered = enumerate(_of_hub(self), 1)
        return [converted(row, self.question, f"{self.hub}:{number}", self.hub) for number, row in numbered]

    def require_available(self) -> None:
        """Raise `ConfigError` where `datasets` is not installed."""
        if importlib.util.find_spec("datasets") is None:
            raise ConfigError("dataset", self.hub, UNAVAILABLE)


def _of_hub(source: DatasetSource) -> list[Row]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("dataset", source.hub, UNAVAILABLE) from error
    try:
        return list(datasets.load_dataset(source.hub, source.config, split=source.split))
    except (OSError, ValueError) as error:
        raise ConfigError("dataset", source.hub, f"cannot be loaded: {error}") from error
