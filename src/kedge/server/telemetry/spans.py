"""OpenTelemetry's spans of one call's generations and of one run, with the attributes of its conventions for
generative AI. They have no text of prompts, answers or tools."""

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
    """See `kedge.server.telemetry.tracing.Span`."""

    def __init__(self, span: Span, model_name: str) -> None:
        self._span, self._model_name = span, model_name

    def submitting(self, requests: Sequence[GenerateRequest]) -> Sequence[GenerateRequest]:
        first = requests[0]
        _set(
            self._span,
            {
                **_asked(first.sampling),
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
        _set(self._span, _answered(completions, self._model_name))
        self._span.end()

    def failed(self, error: BaseException) -> None:
        _fail(self._span, error, str(error))


class WorkflowSpan:
    """A run, with a child for each call of an agent and one for each call of a tool; see
    `kedge.server.telemetry.tracing.RunSpan`."""

    def __init__(self, tracer: Tracer, span: Span, workflow: Workflow, run_id: str, model_name: str) -> None:
        self._tracer, self._span, self._workflow = tracer, span, workflow
        self._model_name = model_name
        self._about = {**PROVIDER, "gen_ai.conversation.id": run_id, "kedge.workflow": workflow.name}
        self._open: dict[RequestId, Span] = {}
        """What goes on of a call: the agent's own span, then its tool's."""
        self._begun: set[RequestId] = set()

    def heard(self, happened: RunEvent) -> None:
        match happened.kind:
            case EventKind.SUBMITTED:
                self._open[happened.request_id] = self._agent(happened)
            case EventKind.TEXT:
                self._note_first(happened)
            case EventKind.ANSWERED:
                self._answered(happened)
            case EventKind.TOOL:
                self._open.pop(happened.request_id).end()

    def ended(self, status: str, error: BaseException | None) -> None:
        self._span.set_attribute("kedge.run.status", status)
        for span in (*self._open.values(), self._span):
            if error is None:
                span.end()
            else:
                _fail(span, error)

    def _agent(self, happened: RunEvent) -> Span:
        agent = self._workflow.agent(happened.agent)
        told = {
            "gen_ai.request.model": self._model_name,
            "kedge.turn": happened.turn,
            "kedge.reuse": agent.reuse.value if agent.reuse else None,
            **_asked(agent.sampling),
        }
        return self._child("invoke_agent", agent, agent.id, told)

    def _note_first(self, happened: RunEvent) -> None:
        if happened.request_id not in self._begun:
            self._begun.add(happened.request_id)
            self._open[happened.request_id].add_event(FIRST_TOKEN)

    def _answered(self, happened: RunEvent) -> None:
        assert happened.completion is not None
        span, agent = self._open.pop(happened.request_id), self._workflow.agent(happened.agent)
        _set(span, _answered([happened.completion], self._model_name))
        span.end()
        if agent.tool is not None:
            name = tool_name(agent.tool)
            told = {"gen_ai.tool.name": name, "gen_ai.tool.type": "function", "kedge.turn": happened.turn}
            self._open[happened.request_id] = self._child("execute_tool", agent, name, told)

    def _child(self, operation: str, agent: Agent, name: str, told: Mapping[str, Any]) -> Span:
        span = self._tracer.start_span(f"{operation} {name}", set_span_in_context(self._span))
        _set(span, {**self._about, "gen_ai.operation.name": operation, "gen_ai.agent.name": agent.id, **told})
        return span


def _asked(sampling: SamplingParams) -> dict[str, Any]:
    return {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.stop_sequences": list(sampling.stop) or None,
    }


def _answered(completions: Sequence[Completion], model_name: str) -> dict[str, Any]:
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
