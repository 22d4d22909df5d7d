"""OpenTelemetry spans of calls and runs, with the attributes of its conventions for generative AI.

They contain no text of prompts, answers or tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.trace import Span, Status, StatusCode, Tracer, set_span_in_context

from kedge.runner.results import EventKind, RunEvent
from kedge.types import Completion, GenerateRequest, RequestId, SamplingParams, Source
from kedge.workflow.graph import Agent, Workflow
from kedge.workflow.spec import tool_name

PROVIDER = {"gen_ai.provider.name": "kedge"}
FIRST_TOKEN = "gen_ai.first_token"


class GenerationSpan:
    """Span of one call's generations, see `kedge.server.telemetry.tracing.CallSpan`."""

    def __init__(self, span: Span, model_name: str) -> None:
        self._span, self._model_name = span, model_name

    def submitting(self, requests: Sequence[GenerateRequest]) -> Sequence[GenerateRequest]:
        first = requests[0]
        _set(
            self._span,
            {
                **_request_attributes(first.sampling),
                "gen_ai.request.choice.count": len(requests) if len(requests) > 1 else None,
                "gen_ai.agent.name": first.agent or None,
                "gen_ai.conversation.id": first.run or None,
                "kedge.workflow": first.workflow or None,
                "kedge.reuse": first.reuse.value,
            },
        )
        return requests

    def begun(self) -> None:
        self._span.add_event(FIRST_TOKEN)

    def ended(self, completions: Sequence[Completion]) -> None:
        _set(self._span, _answer_attributes(completions, self._model_name))
        self._span.end()

    def failed(self, error: BaseException) -> None:
        _fail(self._span, error, str(error))


class WorkflowSpan:
    """Span of a run, with a child per call of an agent or a tool; see `kedge.server.telemetry.tracing.RunSpan`."""

    def __init__(self, tracer: Tracer, span: Span, workflow: Workflow, run_id: str, model_name: str) -> None:
        self._tracer, self._span, self._workflow = tracer, span, workflow
        self._model_name = model_name
        self._about = {**PROVIDER, "gen_ai.conversation.id": run_id, "kedge.workflow": workflow.name}
        self._open: dict[RequestId, Span] = {}
        """Open child span per request: the agent's, then its tool's."""
        self._begun: set[RequestId] = set()

    def record(self, event: RunEvent) -> None:
        match event.kind:
            case EventKind.SUBMITTED:
                self._open[event.request_id] = self._agent(event)
            case EventKind.TEXT:
                self._note_first(event)
            case EventKind.ANSWERED:
                self._answered(event)
            case EventKind.TOOL:
                self._open.pop(event.request_id).end()

    def ended(self, status: str, error: BaseException | None) -> None:
        self._span.set_attribute("kedge.run.status", status)
        for span in (*self._open.values(), self._span):
            if error is None:
                span.end()
            else:
                _fail(span, error)

    def _agent(self, event: RunEvent) -> Span:
        agent = self._workflow.agent(event.agent)
        attributes = {
            "gen_ai.request.model": self._model_name,
            "kedge.turn": event.turn,
            "kedge.reuse": agent.reuse.value if agent.reuse else None,
            **_request_attributes(agent.sampling),
        }
        return self._child("invoke_agent", agent, agent.id, attributes)

    def _note_first(self, event: RunEvent) -> None:
        if event.request_id not in self._begun:
            self._begun.add(event.request_id)
            self._open[event.request_id].add_event(FIRST_TOKEN)

    def _answered(self, event: RunEvent) -> None:
        assert event.completion is not None
        span, agent = self._open.pop(event.request_id), self._workflow.agent(event.agent)
        _set(span, _answer_attributes([event.completion], self._model_name))
        span.end()
        if agent.tool is not None:
            name = tool_name(agent.tool)
            attributes = {"gen_ai.tool.name": name, "gen_ai.tool.type": "function", "kedge.turn": event.turn}
            self._open[event.request_id] = self._child("execute_tool", agent, name, attributes)

    def _child(self, operation: str, agent: Agent, name: str, attributes: Mapping[str, Any]) -> Span:
        span = self._tracer.start_span(f"{operation} {name}", set_span_in_context(self._span))
        _set(span, {**self._about, "gen_ai.operation.name": operation, "gen_ai.agent.name": agent.id, **attributes})
        return span


def _request_attributes(sampling: SamplingParams) -> dict[str, Any]:
    return {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.stop_sequences": list(sampling.stop) or None,
    }


def _answer_attributes(completions: Sequence[Completion], model_name: str) -> dict[str, Any]:
    by_source = {
        f"kedge.prompt_tokens.{source}": sum(one.receipt.tokens(source) for one in completions) for source in Source
    }
    return {
        "gen_ai.response.model": model_name,
        "gen_ai.response.finish_reasons": [one.finish_reason.value for one in completions] or None,
        "gen_ai.usage.input_tokens": sum(one.receipt.prompt_tokens for one in completions),
        "gen_ai.usage.output_tokens": sum(len(one.tokens) for one in completions),
        **by_source,
    }


def _fail(span: Span, error: BaseException, why: str | None = None) -> None:
    span.set_attribute("error.type", type(error).__name__)
    span.set_status(Status(StatusCode.ERROR, why))
    span.end()


def _set(span: Span, attributes: Mapping[str, Any]) -> None:
    span.set_attributes({key: value for key, value in attributes.items() if value is not None})
