"""Adapters of the plug-in to vLLM's minor versions: what differs between them where the plug-in uses their internals.

The adapter is chosen by version. `feature_checks.py` then compares what it expects with the installed vLLM, by names,
attributes and signatures, and a part that does not fit is switched off. So a minor that nobody has tried yet gets the
newest adapter, and as many parts as its checks allow.
"""

from __future__ import annotations

import dis
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import vllm


@dataclass(frozen=True, slots=True)
class Adapter:
    """What differs between the minors of vLLM, and since which one it is so."""

    since: tuple[int, int]
    binds_manager: bool = True
    """Whether vLLM shows a connector its KV cache manager. Otherwise Kedge's scheduler does"""
    admission_limit: str = "max_num_active_reqs"
    """The attribute of the scheduler with the most requests that may run, read before each admission"""
    skips_apart: bool = False
    """Whether waiting requests that were skipped in a step have a queue of their own, `skipped_waiting`, which is
    served first. Otherwise they wait in the queue of all, and `deferred_waiting` has them too
    """
    watches_reuse: bool = True
    """Whether a block pool may be asked to report that a block is handed out again (`_reuse_watchers`)"""


ADAPTERS = (
    Adapter(
        (0, 28), binds_manager=False, admission_limit="max_num_running_reqs", skips_apart=True, watches_reuse=False
    ),
    Adapter((0, 30), admission_limit="max_num_running_reqs", skips_apart=True),
    Adapter((0, 31)),
)
"""Oldest first; each holds until the next one"""
OLDEST, NEWEST = (0, 28), (0, 33)
"""The minors that Kedge is tested with, both inclusive"""


def minor_of(version: str) -> tuple[int, int]:
    """Return (0, 32) for "0.32.1+cpu". A version that cannot be read, as of a build from source, is newer than all."""
    found = re.match(r"(\d+)\.(\d+)(?!\.dev)", version)
    return (int(found[1]), int(found[2])) if found else (1 << 30, 0)


def adapter_for(version: str) -> Adapter:
    """Return the adapter for a version of vLLM: for one that is newer than all known, the newest."""
    minor = minor_of(version)
    return next((one for one in reversed(ADAPTERS) if one.since <= minor), ADAPTERS[0])


def installed() -> Adapter:
    """Return the adapter for the vLLM that is installed."""
    return adapter_for(vllm.__version__)


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
