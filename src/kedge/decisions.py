"""The decisions in an answer: which function it begins by calling, or that it is prose, and what a judge picks."""

from __future__ import annotations

import re

PROSE = "prose"
MAX_PICK = 200
"""Most characters of a pick, and of the text before it"""
_CALL = re.compile(r'\s*(?:<tool_call>\s*)?\{\s*"name"\s*:\s*"([^"\\]+)"')


def first_decision(answer: str) -> str:
    """Return the name of the function that an answer begins by calling (Llama 3's or Hermes' format), or `prose`.

    Only the beginning counts, so that an answer that is still being written has its decision early; whether the rest
    is a valid call is for the server's parsers to say.
    """
    found = _CALL.match(answer)
    return found[1] if found else PROSE


def pick_of(answer: str, mark: str) -> str | None:
    """Return what stands behind the last `mark` in an answer, up to the end of the line; None where there is nothing.

    Markup, punctuation and spaces around it are left out, and case: `**B**.` and `b` are one pick. O(characters).
    """
    _, found, rest = answer.rpartition(mark)
    line = rest.strip().partition("\n")[0] if found else ""
    return line[:MAX_PICK].strip(" \t*_`'\".,;:!()[]{}<>").casefold() or None
