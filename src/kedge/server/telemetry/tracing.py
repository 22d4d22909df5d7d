"""Tracing of generations and runs, with OpenTelemetry or not at all.

A span is a child of the one in the caller's `traceparent` header. It contains no text of prompts or answers. The extra
`otel` is needed only where tracing is on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

from kedge.errors import ConfigError
from kedge.runner.results import RunEvent
from kedge.types import Completion, GenerateRequest
from kedge.workflow.graph import Workflow

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer, TracerProvider

CHAT = "/v1/chat/completions"
_OPERATION = "kedge.operation"


class CallSpan(Protocol):
    """Span of one call's generations, from their submission to their end."""

    def submitting(self, requests: Sequence[GenerateRequest]) -> Sequence[GenerateRequest]:
        """Record the attributes of the requests and return them unchanged."""

    def begun(self) -> None:
        """Record the first token of a generation."""

    def ended(self, completions: Sequence[Completion]) -> None:
        """End the span: nothing of the call is left in the engine."""

    def failed(self, error: BaseException) -> None:
        """End the span with the error that kept the call from beginning."""


class RunSpan(Protocol):
    """Span of one run that the server drives. Only one thread at a time calls it."""

    def record(self, event: RunEvent) -> None:
        """Record an event of the run."""

    def ended(self, status: str, error: BaseException | None) -> None:
        """End the span and those of unfinished calls, with the error if one ended the run."""


class Tracing(Protocol):
    """Factory of spans."""

    def called(self, path: str, headers: Mapping[str, str]) -> AbstractContextManager[None]:
        """Return a context in which new spans are children of the caller's; `path` is the route's."""

    def generation(self, tenant: str) -> CallSpan:
        """Begin the span of a call's generations, before they are submitted."""

    def run(self, tenant: str, run_id: str, workflow: Workflow) -> RunSpan:
        """Begin the span of a workflow run."""


class _NoSpan:
    def submitting(self, requests: Sequence[GenerateRequest]) -> Sequence[GenerateRequest]:
        return requests

    def begun(self) -> None: ...
    def ended(self, completions: Sequence[Completion]) -> None: ...
    def failed(self, error: BaseException) -> None: ...


class _NoRunSpan:
    def record(self, event: RunEvent) -> None: ...
    def ended(self, status: str, error: BaseException | None) -> None: ...


class NoTracing:
    """Tracing without spans."""

    def called(self, path: str, headers: Mapping[str, str]) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def generation(self, tenant: str) -> CallSpan:  # noqa: ARG002
        return _NoSpan()

    def run(self, tenant: str, run_id: str, workflow: Workflow) -> RunSpan:  # noqa: ARG002
        return _NoRunSpan()


class OpenTelemetry:
    """Tracing with a tracer provider of OpenTelemetry."""

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        from opentelemetry.propagate import extract

        self._tracer: Tracer = provider.get_tracer("kedge")
        self._model_name, self._extract = model_name, extract

    @contextmanager
    def called(self, path: str, headers: Mapping[str, str]) -> Iterator[None]:
        from opentelemetry import context

        operation = "chat" if path == CHAT else "text_completion"
        token = context.attach(context.set_value(_OPERATION, operation, self._extract(headers)))
        try:
            yield
        finally:
            context.detach(token)

    def generation(self, tenant: str) -> CallSpan:
        from opentelemetry import context
        from opentelemetry.trace import SpanKind

        from kedge.server.telemetry.spans import PROVIDER, GenerationSpan

        operation = str(context.get_value(_OPERATION))
        attributes = {
            **PROVIDER,
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": self._model_name,
            "kedge.tenant": tenant,
        }
        span = self._tracer.start_span(f"{operation} {self._model_name}", kind=SpanKind.SERVER, attributes=attributes)
        return GenerationSpan(span, self._model_name)

    def run(self, tenant: str, run_id: str, workflow: Workflow) -> RunSpan:
        from kedge.server.telemetry.spans import PROVIDER, WorkflowSpan

        attributes = {
            **PROVIDER,
            "gen_ai.operation.name": "invoke_workflow",
            "gen_ai.workflow.name": workflow.name,
            "gen_ai.conversation.id": run_id,
            "kedge.tenant": tenant,
        }
        span = self._tracer.start_span(f"invoke_workflow {workflow.name}", attributes=attributes)
        return WorkflowSpan(self._tracer, span, workflow, run_id, self._model_name)


def exporting(model_name: str) -> OpenTelemetry:
    """Return tracing to an OTLP collector, as OpenTelemetry's `OTEL_…` variables configure it.

    Raises `ConfigError` without the extra `otel`.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError("server.tracing", error.name, "is not installed: pip install 'kedge[otel]'") from error
    provider = TracerProvider(resource=Resource.create({"service.name": "kedge"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return OpenTelemetry(provider, model_name)
