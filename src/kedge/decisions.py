"""The decisions in an answer: which function it begins by calling, or that it is prose, and what a judge picks."""

import re
from decimal import Decimal

PROSE = "prose"
MAX_PICK = 200
"""Most characters of a pick, and of the text before it"""
NUMBER = r"-?[0-9][0-9,]*(?:\.[0-9]+)?"
_READ_AS = {
    "<number>": re.compile(NUMBER),
    "<letter>": re.compile(r"(?<!\w)[^\W\d_](?!\w)"),
    "<word>": re.compile(r"\w+"),
}
_BRACED = "<braced>"
_CALL = re.compile(r'\s*(?:<tool_call>\s*)?\{\s*"name"\s*:\s*"([^"\\]+)"')


def first_decision(answer: str) -> str:
    """Return the name of the function that an answer begins by calling (Llama 3's or Hermes' format), or `prose`.

    Only the beginning counts, so that an answer that is still being written has its decision early; whether the rest
    is a valid call is for the server's parsers to say.
    """
    found = _CALL.match(answer)
    return found[1] if found else PROSE


def pick_of(answer: str, pick: str) -> str | None:
    """Return what an answer picks in comparable form; None where it picks nothing.

    `pick` is the text before it, which counts where it stands last, and may end in how to read what follows:
    `<number>`, `<letter>` (one that stands alone) or `<word>`, the first of these, and `<braced>`, from one brace to
    that which closes it, as in `\\boxed<braced>`. Without such an end it is the rest of the line. A reading alone is
    the first in the whole answer. `1,200.50` and `1200.5` are one number; case, and markup and punctuation around a
    line, are left out. O(characters).
    """
    mark, opened, name = pick.rpartition("<")
    reading = opened + name
    if reading not in _READ_AS and reading != _BRACED:
        mark, reading = pick, ""
    mark = mark.rstrip() if reading else mark
    _, found, rest = answer.rpartition(mark) if mark else ("", "<", answer)
    if not found:
        return None
    if not reading:
        line = rest.strip().partition("\n")[0]
        return line[:MAX_PICK].strip(" \t*_`'\".,;:!()[]{}<>").casefold() or None
    if reading == _BRACED:
        return braced(rest.lstrip()[: MAX_PICK + 2]) or None
    matched = _READ_AS[reading].search(rest)
    read = matched[0][:MAX_PICK].casefold() if matched else ""
    return (normalized(read) if read and reading == "<number>" else read) or None


def braced(text: str) -> str | None:
    """Return what is in the braces that a text begins with, inner ones included; None where they are not closed."""
    depth = 0
    for at, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if depth <= 0:
            return text[1:at].strip() if char == "}" else None
    return None


def normalized(digits: str) -> str:
    """Normalize a decimal number: `1,200.50` becomes `1200.5`."""
    value = Decimal(digits.replace(",", ""))
    return f"{value.normalize():f}" if value else "0"
