"""Tasks of real text that come with the package, by name: GSM8K, and reading paragraphs of XQuAD."""

import random
from itertools import chain, zip_longest
from pathlib import Path

from kedge.errors import ConfigError
from kedge.workloads import gsm8k, reading
from kedge.workloads.base import Question, Team, read_rows

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
        asked = read_rows(file or data / "gsm8k.jsonl", gsm8k.question, "a row of GSM8K")
        return TEAMS[name], rng.sample(asked, len(asked))
    paragraphs = read_rows(file or data / "xquad-en.jsonl", reading.questions, "a row of XQuAD")
    if name == reading.LONG.name:
        paragraphs = reading.lengthened(paragraphs)
    if name == reading.SESSIONS.name:
        return TEAMS[name], [
            one for about in rng.sample(paragraphs, len(paragraphs)) for one in reading.continued(about)
        ]
    rounds = zip_longest(*rng.sample(paragraphs, len(paragraphs)))
    return TEAMS[name], [one for one in chain.from_iterable(rounds) if one]
