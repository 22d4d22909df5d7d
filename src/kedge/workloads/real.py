"""Tasks of real text that come with the package, by name: GSM8K, and reading paragraphs of XQuAD."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import chain, zip_longest
from pathlib import Path
from typing import TypeVar

from kedge.errors import ConfigError
from kedge.workloads import gsm8k, reading
from kedge.workloads.base import Question, Row, Team, read_rows

Item = TypeVar("Item")

TEAMS = {team.name: team for team in (gsm8k.GSM8K, reading.READING, reading.LONG, reading.SESSIONS)}


def load(name: str, file: Path | None = None, seed: int = 0) -> tuple[Team, list[Question]]:
    """Return a task with its questions in an order that `seed` shuffles; `file` replaces those of the package.

    No paragraph is read a second time before all others were read, but in sessions, whose turns stay together. Raises
    `ConfigError` for an unknown name, and as `read_rows` does.
    """
    if name not in TEAMS:
        raise ConfigError("task", name, f"must be one of {', '.join(TEAMS)}")
    data, rng = Path(__file__).with_name("data"), random.Random(seed)
    if name == gsm8k.GSM8K.name:
        asked = _read(file or data / "gsm8k.jsonl", gsm8k.question, "GSM8K")
        return TEAMS[name], rng.sample(asked, len(asked))
    paragraphs = _read(file or data / "xquad-en.jsonl", reading.questions, "XQuAD")
    if name == reading.LONG.name:
        paragraphs = reading.lengthened(paragraphs)
    if name == reading.SESSIONS.name:
        return TEAMS[name], [
            one for about in rng.sample(paragraphs, len(paragraphs)) for one in reading.continued(about)
        ]
    rounds = zip_longest(*rng.sample(paragraphs, len(paragraphs)))
    return TEAMS[name], [one for one in chain.from_iterable(rounds) if one]


def _read(file: Path, convert: Callable[[Row], Item], source: str) -> list[Item]:
    """Convert all rows of a file, in their order; `source` is the data set's name.

    `convert` raises `KeyError`, `ValueError` or `TypeError` for a row of another data set. Raises `ConfigError` for
    that, and as `read_rows` does.
    """
    found = []
    for where, row in read_rows(file, "dataset"):
        try:
            found.append(convert(row))
        except (KeyError, ValueError, TypeError) as error:
            raise ConfigError("dataset", where, f"is not a row of {source}: {error!r}") from error
    return found
