"""Tracing of generations and runs with OpenTelemetry.

A span is a child of the one in the caller's `traceparent` header. Attributes are those of OpenTelemetry's conventions
for generative AI. No span contains text of prompts, answers or tools. Needs the extra `otel`; this module is imported
where tracing is on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry import context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from kedge.runner.run import EventKind, RunEvent
from kedge.types import Completion, GenerateRequest, RequestId, SamplingParams, Source
from kedge.workflow.graph import Workflow
from kedge.workflow.spec import tool_name


class OpenTelemetry:
    """Factory of spans, with a tracer provider of OpenTelemetry."""

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        self._tracer, self.model_name = provider.get_tracer("kedge"), model_name

    @contextmanager
    def called(self, headers: Mapping[str, str]) -> Iterator[None]:
        """Let new spans be children of the caller's."""
        token = context.attach(extract(headers))
        try:
            yield
        finally:
            context.detach(token)

    def begin(
        self, operation: str, name: str, about: Mapping[str, Any], within: Span | None = None, kind: str = "INTERNAL"
    ) -> Span:
        """Begin a span `within` another one, or else within the caller's."""
        known = _known({"gen_ai.provider.name": "kedge", "gen_ai.operation.name": operation, **about})
        parent = set_span_in_context(within) if within else None
        return self._tracer.start_span(f"{operation} {name}", parent, kind=SpanKind[kind], attributes=known)

    def generation(self, operation: str, tenant: str) -> GenerationSpan:
        """Begin the span of a call's generations, before they are submitted."""
        attributes = {"gen_ai.request.model": self.model_name, "kedge.tenant": tenant}
        return GenerationSpan(self.begin(operation, self.model_name, attributes, kind="SERVER"), self.model_name)

    def run(self, tenant: str, run_id: str, workflow: Workflow) -> WorkflowSpan:
        """Begin the span of a run of the server."""
        return WorkflowSpan(self, tenant, run_id, workflow)


def exporting(model_name: str) -> OpenTelemetry:
    """Return tracing to an OTLP collector, as OpenTelemetry's `OTEL_…` variables configure it."""
    provider = TracerProvider(resource=Resource.create({"service.name": "kedge"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return OpenTelemetry(provider, model_name)


class GenerationSpan:
    """Span of one call's generations, from their submission to their end."""

    def __init__(self, span: Span, model_name: str) -> None:
        self._span, self._model_name = span, model_name
        self._submitted: int = getattr(span, "start_time", 0)  # 0 of a span that is not recorded

    def submitting(self, requests: Sequence[GenerateRequest]) -> None:
        """Record the attributes of the requests."""
        first, self._submitted = requests[0], time.time_ns()
        attributes = {
            **_request_attributes(first.sampling),
            "gen_ai.request.choice.count": len(requests) if len(requests) > 1 else None,
            "gen_ai.agent.name": first.agent or None,
            "gen_ai.conversation.id": first.run or None,
            "kedge.workflow": first.workflow or None,
            "kedge.reuse": first.reuse.value,
        }
        self._span.set_attributes(_known(attributes))

    def ended(self, completions: Sequence[Completion]) -> None:
        """End the span: nothing of the call is left in the engine. The first tokens came when the receipts say."""
        for one in completions:
            if one.tokens:
                self._span.add_event("gen_ai.first_token", timestamp=self._submitted + round(one.ttft_ms * 1e6))
        receipts = [one.receipt for one in completions]
        attributes = {
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.finish_reasons": [one.finish_reason.value for one in completions] or None,
            "gen_ai.usage.input_tokens": sum(one.prompt_tokens for one in receipts),
            "gen_ai.usage.output_tokens": sum(len(one.tokens) for one in completions),
            **{f"kedge.prompt_tokens.{source}": sum(one.tokens(source) for one in receipts) for source in Source},
        }
        self._span.set_attributes(_known(attributes))
        self._span.end()

    def failed(self, error: BaseException) -> None:
        """End the span with the error that kept the call from beginning."""
        _fail(self._span, error, str(error))


class WorkflowSpan:
    """Span of a run of the server, with a child per call of an agent or a tool. One thread at a time calls it."""

    def __init__(self, tracing: OpenTelemetry, tenant: str, run_id: str, workflow: Workflow) -> None:
        """Begin the span."""
        self._tracing, self._workflow = tracing, workflow
        about = {"gen_ai.conversation.id": run_id, "gen_ai.workflow.name": workflow.name, "kedge.tenant": tenant}
        self._span = tracing.begin("invoke_workflow", workflow.name, about)
        self._about = {"gen_ai.conversation.id": run_id, "kedge.workflow": workflow.name}
        self._open: dict[RequestId, Span] = {}
        """Open child span per request: the agent's, then its tool's."""

    def record(self, event: RunEvent) -> None:
        """Record an event of the run."""
        agent, request = self._workflow.agent(event.agent), event.request_id
        about = {**self._about, "gen_ai.agent.name": agent.id, "kedge.turn": event.turn}
        match event.kind:
            case EventKind.SUBMITTED:
                about |= {"gen_ai.request.model": self._tracing.model_name, **_request_attributes(agent.sampling)}
                about["kedge.reuse"] = agent.reuse and agent.reuse.value
                self._open[request] = self._tracing.begin("invoke_agent", agent.id, about, self._span)
            case EventKind.ANSWERED if event.completion:
                GenerationSpan(self._open.pop(request), self._tracing.model_name).ended([event.completion])
                if agent.tool is not None:
                    name = tool_name(agent.tool)
                    about |= {"gen_ai.tool.name": name, "gen_ai.tool.type": "function"}
                    self._open[request] = self._tracing.begin("execute_tool", name, about, self._span)
            case EventKind.TOOL:
                self._open.pop(request).end()

    def ended(self, status: str, error: BaseException | None) -> None:
        """End the span and those of unfinished calls, with the error if one ended the run."""
        self._span.set_attribute("kedge.run.status", status)
        for span in (*self._open.values(), self._span):
            if error is None:
                span.end()
            else:
                _fail(span, error)


def _request_attributes(sampling: SamplingParams) -> dict[str, Any]:
    return {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.stop_sequences": list(sampling.stop) or None,
    }


def _fail(span: Span, error: BaseException, why: str | None = None) -> None:
    span.set_attribute("error.type", type(error).__name__)
    span.set_status(Status(StatusCode.ERROR, why))
    span.end()


def _known(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that have a value."""
    return {key: value for key, value in attributes.items() if value is not None}
