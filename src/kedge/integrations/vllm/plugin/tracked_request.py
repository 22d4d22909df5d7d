"""A request with hints, as the scheduler's half of the plug-in follows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kedge.integrations.vllm.plugin.hints import HintedRequest

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(eq=False, slots=True)
class TrackedRequest:
    """A request with hints from its arrival to its end, with the sources of its prompt's tokens."""

    hinted: HintedRequest
    request: Request
    device: int = 0
    """Leading tokens whose KV is on the device"""
    translated: int = 0
    """Tokens after them that are translated"""
    host: range = range(0)
    """Those of the device's that the request waited for while they were loaded from the host"""
    waiting_since: float | None = None
    """Time at which it first had to wait for a load"""
    wanted_from: int | None = None
    """Index of the block from which on it wants a load"""
    load_ordered: bool = False
    """Whether its one load was ordered, or given up"""
