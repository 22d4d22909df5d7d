"""Requests as the scheduler's half of the plug-in follows them, from their arrival to their end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kedge.integrations.vllm.plugin.hints import HintedRequest
from kedge.integrations.vllm.plugin.owner_sets import Owner

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
    """Time at which it first had to wait for a load"""
    wanted_from: int | None = None
    """Index of the block from which on it wants a load"""
    is_ordered: bool = False
    """Whether the load that it waits for was ordered, or given up"""


@dataclass(eq=False, slots=True)
class TrackedRequest:
    """A request with hints, with the sources of its prompt's tokens."""

    hinted: HintedRequest
    request: Request
    device: int = 0
    """Leading tokens whose KV is on the device"""
    translated: int = 0
    """Tokens after them that are translated"""
    load: RequestLoad = field(init=False)
    """Some of the device's tokens come from here"""

    def __post_init__(self) -> None:
        self.load = RequestLoad(self.request)
