"""Requests as the scheduler's half of the plug-in follows them, from their arrival to their end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kedge.integrations.vllm.plugin.hints import HintedRequest
from kedge.integrations.vllm.plugin.owner_sets import Owner
from kedge.reuse.holes import Holes

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(eq=False, slots=True)
class RequestLoad:
    """What a request has and wants from the host."""

    request: Request
    owner: Owner | None = None
    """The session that the loaded blocks belong to"""
    is_admitted: bool = False
    is_ahead: bool = False
    """Whether a load was ordered before vLLM looked at it"""
    tokens: range = range(0)
    """Tokens of its prompt that it waited for while they were loaded"""
    waiting_since: float | None = None
    """Time from which on it has waited for a load under way, or for room for one as the next to be served"""
    orders: int = 0
    """Loads that were ordered on its demand"""
    computes: bool = False
    """Whether no further load is ordered for it: it computes what it lacks then"""


@dataclass(eq=False, slots=True)
class TrackedRequest:
    """A request with hints, with the sources of its prompt's tokens."""

    hinted: HintedRequest
    request: Request
    device: int = 0
    """Leading tokens whose KV is on the device"""
    translated: Holes = ()
    """Positions after them whose KV is translated"""
    load: RequestLoad = field(init=False)
    """Some of the device's tokens come from here"""

    def __post_init__(self) -> None:
        self.load = RequestLoad(self.request)
