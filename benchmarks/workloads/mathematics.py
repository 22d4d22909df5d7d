"""Teams for mathematics: MATH500 and AIME (KVCOMM, Table A.2), with the roles of GSM8K's.

MATH500's answers are LaTeX expressions; whether two are the same is decided by `math-verify` (extra `data`).
"""

from __future__ import annotations

import random
import re
import threading

from benchmarks.workloads.rows import DatasetSource
from kedge.decisions import braced
from kedge.errors import ConfigError
from kedge.workloads.base import Question, Team
from kedge.workloads.gsm8k import SILENT, WORDING, agents, number, other_number
from kedge.workloads.rows import Row

SECONDS = 5
"""Time limit for parsing or comparing an expression; one that takes longer counts as wrong."""
_BOX = r"Put the final result, and only that, into \boxed{{}}."
_PICK = r"\boxed<braced>"
_STATED = re.compile(r"answer is:?\s*(.+?)\.?\s*$", re.IGNORECASE | re.MULTILINE)


def boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{…}`, inner braces included; None where none is closed."""
    start = text.rfind(r"\boxed{")
    return braced(text[start + len(r"\boxed") :]) if start >= 0 else None


def competition_question(row: Row) -> Question:
    """Convert a row with `problem` and `answer`, under names in any case."""
    fields = {name.lower(): value for name, value in row.items()}
    answer = str(fields["answer"]).strip()
    if not answer:
        raise ValueError("the answer is empty")
    return Question(str(fields["problem"]).strip(), answer, {"level": fields.get("level", "")})


def stated(text: str) -> str | None:
    """Return what is boxed last, else what follows the last `answer is`."""
    if (found := boxed(text)) is not None:
        return found
    results = _STATED.findall(text)
    return results[-1].strip("$ ") if results else None


def is_equal(stated: str | None, asked: Question) -> bool:
    """Return whether both are equal as expressions. Raises `ConfigError` without `math-verify`."""
    if not stated:
        return False
    if stated == asked.answer:
        return True
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ConfigError("math-verify", asked.answer, "is needed to score: pip install 'kedge[data]'") from error
    # math-verify's time limit is a signal, which only the main thread receives
    seconds = SECONDS if threading.current_thread() is threading.main_thread() else None
    gold, answer = (parse(f"${text}$", parsing_timeout=seconds) for text in (asked.answer, stated))
    return bool(verify(gold, answer, timeout_seconds=seconds))


def is_integer(stated: str | None, asked: Question) -> bool:
    """Return whether both are equal as whole numbers; AIME writes them with leading zeros."""
    return stated is not None and number(stated) == number(asked.answer)


def wrong(rng: random.Random, text: str) -> str:
    """Replace the number in the stated result by another; append `+ 1` to a result without a number."""
    box = boxed(text)
    if box is None:
        return other_number(rng, text)
    changed = other_number(rng, box)
    return text if not box else f"{{{changed if changed != box else f'{box} + 1'}}}".join(text.rsplit(f"{{{box}}}", 1))


MATH500_SOURCE = DatasetSource("HuggingFaceH4/MATH-500", "test", competition_question)
AIME_SOURCE = DatasetSource("ChuGyouk/AIME-22-25", "train", competition_question)
MATH500 = Team("math500", agents(_BOX, 512, pick=_PICK), WORDING, stated, is_equal, SILENT, wrong)
_AIME_BOX = f"{_BOX} It is a whole number from 0 to 999."
AIME = Team("aime", agents(_AIME_BOX, 2048, pick=_PICK), WORDING, stated, is_integer, SILENT, wrong)
