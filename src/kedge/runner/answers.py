"""Reading an agent's answer, and calling its tool, in a thread of the step's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kedge.engine.base import Stream
from kedge.errors import KedgeError, RequestError
from kedge.runner.results import AgentResult, EventKind, RunEvent
from kedge.runner.tools import OnToolError, tool_result
from kedge.types import Completion, FinishReason
from kedge.workflow.graph import Agent, Step


@dataclass(frozen=True)
class AnswerReader:
    """How the answers of a run are read, and where events go. Several threads may read with it at once."""

    inputs: Mapping[str, str]
    on_tool_error: OnToolError
    post: Callable[[RunEvent], None]
    streams_text: bool
    """Whether text is posted as it comes."""
    stopping: threading.Event
    """Once it is set, no tool is called any more."""

    def read(self, step: Step, agent: Agent, stream: Stream) -> AgentResult:
        """Wait for the end of `stream` and of the agent's tool, and return both results.

        Raises the stream's error, `ToolError`, or `RequestError` for a response that was cancelled.
        """
        try:
            completion = self._answer(step, stream)
            result = None
            if agent.tool is not None and not self.stopping.is_set():
                result = tool_result(agent, completion.text, self.inputs, self.on_tool_error)
                self._post(EventKind.TOOL, step, stream, result)
        except KedgeError as error:
            add_place(error, step)
            raise
        return AgentResult(step.agent, step.turn, completion, result)

    def _answer(self, step: Step, stream: Stream) -> Completion:
        if self.streams_text:
            for delta in stream:
                self._post(EventKind.TEXT, step, stream, delta.text)
        completion = stream.result()
        if completion.finish_reason is FinishReason.CANCELLED:
            raise RequestError(f"agent {step.agent}", completion.request_id, "its response was cancelled")
        self._post(EventKind.ANSWERED, step, stream, completion.text, completion)
        return completion

    def _post(self, kind: EventKind, step: Step, stream: Stream, text: str, done: Completion | None = None) -> None:
        self.post(RunEvent(kind, step.agent, step.turn, stream.request_id, text, done))


def add_place(error: KedgeError, step: Step) -> None:
    """Note in an error which step it is from."""
    error.add_note(f"agent {step.agent}, turn {step.turn}")
