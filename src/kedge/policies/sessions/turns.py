"""What is known of a session's turns: whose they are, how they end, and when the next one comes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kedge.types import AgentKey, GenerateRequest, Namespace


class StopReason(StrEnum):
    """What an answer ended with: what the session now waits for."""

    TOOL = "tool"
    USER = "user"
    UNKNOWN = "unknown"


class SessionKey(NamedTuple):
    """A session's name in its namespace: the id that it was given, or a number."""

    namespace: Namespace
    name: str | int


@dataclass(frozen=True, slots=True)
class SessionHints:
    """What a request says of its session; all optional."""

    session: str = ""
    """Id of the session, the same for all its requests"""
    sub_agent: bool = False
    returns_in: float | None = None
    """Seconds from the answer to the session's next request"""
    is_last: bool = False
    """Whether the session ends with this request"""
    keep_for: float | None = None
    """Seconds from the answer for which the session's KV is to be kept; 0: it may go first"""
    expects: Mapping[str, float] = field(default_factory=dict)
    """Other sessions -> seconds until they are needed; infinite: not any more"""
    flow: Hashable = None
    """The agent of a workflow that asks, the same in all runs, where it is known"""
    agent: AgentKey | None = None
    """The same agent in its run, as forecasts name it"""

    @classmethod
    def of(cls, request: GenerateRequest) -> SessionHints:
        """Return what a request says of its session."""
        turn = request.turn
        flow, agent = None, None
        if request.agent:
            flow, agent = (request.namespace, request.workflow, request.agent), request.agent_key
        return cls(
            turn.session, bool(turn.parent), turn.returns_in, turn.is_last, turn.keep_for, turn.expects, flow, agent
        )


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """What the end of a turn says of when the session returns; all optional."""

    stop: StopReason = StopReason.UNKNOWN
    tool: str = ""
    """Name of what the answer calls"""
    returns_in: float | None = None
    """Seconds until the session's next request"""
    is_last: bool = False
    """Whether there is none"""
    keep_for: float | None = None
    """Seconds for which the session's KV is to be kept; 0: it may go first"""


NO_HINTS, UNKNOWN_END = SessionHints(), TurnEnd()
