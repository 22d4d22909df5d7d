"""Tasks of real text that come with the package, by name: GSM8K, and reading paragraphs of XQuAD."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import chain, zip_longest
from pathlib import Path
from typing import TypeVar

from kedge.errors import ConfigError
from kedge.workloads import gsm8k, reading
from kedge.workloads.base import Question, Row, Team

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
        asked = read_rows(file or data / "gsm8k.jsonl", gsm8k.question, "GSM8K")
        return TEAMS[name], rng.sample(asked, len(asked))
    paragraphs = read_rows(file or data / "xquad-en.jsonl", reading.questions, "XQuAD")
    if name == reading.LONG.name:
        paragraphs = reading.lengthened(paragraphs)
    if name == reading.SESSIONS.name:
        return TEAMS[name], [
            one for about in rng.sample(paragraphs, len(paragraphs)) for one in reading.continued(about)
        ]
    rounds = zip_longest(*rng.sample(paragraphs, len(paragraphs)))
    return TEAMS[name], [one for one in chain.from_iterable(rounds) if one]


def read_rows(file: Path, convert: Callable[[Row], Item], source: str) -> list[Item]:
    """Convert all rows of a JSONL file, in their order; `source` is the data set's name.

    `convert` raises `KeyError`, `ValueError` or `TypeError` for a row of another data set. Raises `ConfigError` for
    that, which names the line, and for an unreadable file.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # `splitlines` also splits at characters within a text
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("dataset", str(file), str(error)) from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                found.append(convert(json.loads(line)))
        except (KeyError, ValueError, TypeError) as error:  # of which one is for what is not JSON
            raise ConfigError("dataset", f"{file}:{number}", f"is not a row of {source}: {error!r}") from error
    return found
