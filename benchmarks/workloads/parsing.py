"""Parsing of answers: the last stated number, code block or boxed expression in a text."""

from __future__ import annotations

import ast
import random
import re
from decimal import Decimal

from kedge.decisions import NUMBER, braced, spelled

_STATED = re.compile(rf"(?:answer is|####)[^\d\n-]{{0,12}}({NUMBER})", re.IGNORECASE)
_ANY = re.compile(NUMBER)
_FENCE = re.compile(r"```[\w+-]*[^\S\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PROGRAM = re.compile(r"^(?:def |class |import |from |@)", re.MULTILINE)


def number(text: str) -> str | None:
    """Return the number after the last `answer is` (or `####`), else the last number, normalized; None without one."""
    found = _STATED.findall(text) or _ANY.findall(text)
    return None if not found else spelled(found[-1])


def other_number(rng: random.Random, text: str) -> str:
    """Return `text` with another number in the place of the last one that it states."""
    found = list(_STATED.finditer(text)) or list(_ANY.finditer(text))
    if not found:
        return text
    group = 1 if found[-1].re is _STATED else 0
    wrong = str(Decimal(spelled(found[-1][group])) + rng.randint(1, 9))
    return text[: found[-1].start(group)] + wrong + text[found[-1].end(group) :]


def code(text: str) -> str | None:
    """Return the last fenced block of Python (else the last fenced block), else everything from the first line of
    Python on, else None.
    """
    if blocks := [block.rstrip() for block in _FENCE.findall(text)]:
        return next(filter(_is_python, reversed(blocks)), blocks[-1])
    begins = _PROGRAM.search(text)
    return text[begins.start() :].rstrip() if begins else None


def _is_python(block: str) -> bool:
    try:
        return bool(ast.parse(block).body)
    except (SyntaxError, ValueError):
        return False


def boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{…}`, inner braces included; None where none is closed."""
    start = text.rfind(r"\boxed{")
    return braced(text[start + len(r"\boxed") :]) if start >= 0 else None
