"""What a run of a workflow gives: events while it goes on, and its result."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kedge.errors import WorkflowError
from kedge.types import AgentId, Completion, RequestId, RunId


@dataclass(frozen=True, slots=True)
class AgentResult:
    """An agent's answer in one turn, and the result of its tool."""

    agent: AgentId
    turn: int
    completion: Completion
    tool_result: str | None = None

    @property
    def text(self) -> str:
        """The answer."""
        return self.completion.text


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished run. `results` are in the order of `Workflow.steps`, whatever order they ran in."""

    run_id: RunId
    results: tuple[AgentResult, ...]
    total_ms: float

    @property
    def text(self) -> str:
        """The answer of the last agent in the last turn."""
        return self.results[-1].text

    def of(self, agent: str, turn: int = -1) -> AgentResult:
        """Return an agent's result in a turn, counted from the end if negative. Raises `WorkflowError` without one."""
        results = [result for result in self.results if result.agent == agent]
        if not -len(results) <= turn < len(results):
            raise WorkflowError(f"agent {agent}: turn", turn, f"it has answered {len(results)} times")
        return results[turn]


class EventKind(StrEnum):
    """What has happened in a run."""

    SUBMITTED = "submitted"
    TEXT = "text"
    ANSWERED = "answered"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Something that happened to one step of a run."""

    kind: EventKind
    agent: AgentId
    turn: int
    request_id: RequestId
    text: str = ""
    """TEXT: what became certain; ANSWERED: the whole answer; TOOL: the tool's result."""
    completion: Completion | None = None
    """Only with ANSWERED."""
