"""The first decision of an answer: which function it calls, or that it is prose."""

from __future__ import annotations

import re

PROSE = "prose"
_CALL = re.compile(r'\s*(?:<tool_call>\s*)?\{\s*"name"\s*:\s*"([^"\\]+)"')


def first_decision(answer: str) -> str:
    """Return the name of the function that an answer begins by calling (Llama 3's or Hermes' format), or `prose`.

    Only the beginning counts, so that an answer that is still being written has its decision early; whether the rest
    is a valid call is for the server's parsers to say.
    """
    found = _CALL.match(answer)
    return found[1] if found else PROSE
