"""The versions of vLLM whose internals the plug-in uses, and how it looks at them.

`feature_checks.py` compares what is expected with the installed vLLM, by names, attributes and signatures, and switches
off a part that does not fit: also on a minor that nobody has tried yet.
"""

from __future__ import annotations

import dis
import re
from collections.abc import Callable, Iterable
from typing import Any

OLDEST, NEWEST = (0, 31), (0, 33)
"""The minors that Kedge is tested with, both inclusive"""


def minor_of(version: str) -> tuple[int, int]:
    """Return (0, 32) for "0.32.1+cpu". A version that cannot be read, as of a build from source, is newer than all."""
    found = re.match(r"(\d+)\.(\d+)(?!\.dev)", version)
    return (int(found[1]), int(found[2])) if found else (1 << 30, 0)


def version_refusal(version: str) -> str | None:
    """Return the reason why no part of the plug-in runs on a version of vLLM, or None."""
    if minor_of(version) >= OLDEST:
        return None
    return f"vLLM {version} is too old; must be 0.{OLDEST[1]} or newer"


def untested(version: str) -> str | None:
    """Return a line for the log about a version that Kedge has not been tested with, or None."""
    if minor_of(version) <= NEWEST:
        return None
    return f"vLLM {version} is newer than 0.{NEWEST[1]}, the last one tested; what is on was found by its checks"


def parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's parameters."""
    code = function.__code__
    return list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def missing_attributes(cls: type, names: Iterable[str]) -> list[str]:
    """Return those of `names` that the instances of `cls` do not have: neither the class has them nor `__init__`."""
    stored = {step.argval for step in dis.get_instructions(cls.__init__) if step.opname == "STORE_ATTR"}  # type: ignore[misc]
    return sorted(name for name in names if name not in stored and not hasattr(cls, name))
