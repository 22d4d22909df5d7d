"""Where spans of generations and runs go, and the telling of them to OpenTelemetry.

A span is a child of the one that the caller's `traceparent` header names. It has no text of prompts or answers. The
extra `otel` is needed only where tracing is on.
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


class Span(Protocol):
    """One call's generations, from their submission to their end."""

    def submitting(self, requests: Sequence[GenerateRequest]) -> Sequence[GenerateRequest]:
        """Notes what is asked for, and gives it back."""

    def begun(self) -> None:
        """A first token has come."""

    def ended(self, completions: Sequence[Completion]) -> None:
        """Nothing of the call is left in the engine."""

    def failed(self, error: BaseException) -> None:
        """The call could not begin."""


class RunSpan(Protocol):
    """One run of a workflow that the server drives. One thread at a time calls it."""

    def heard(self, happened: RunEvent) -> None:
        """Something happened in the run."""

    def ended(self, status: str, error: BaseException | None) -> None:
        """The run is over; the error, if one ended it. What has no answer by then gets none."""


class Tracing(Protocol):
    """Where spans go."""

    def called(self, path: str, headers: Mapping[str, str]) -> AbstractContextManager[None]:
        """While a call of `path` is answered: spans begin below the caller's."""

    def generation(self, tenant: str) -> Span:
        """A call's generations are about to be submitted."""

    def run(self, tenant: str, run_id: str, workflow: Workflow) -> RunSpan:
        """A run of a workflow begins."""


class _NoSpan:
    def submitting(self, requests: Sequence[GenerateRequest]) -> Sequence[GenerateRequest]:
        return requests

    def begun(self) -> None: ...
    def ended(self, completions: Sequence[Completion]) -> None: ...
    def failed(self, error: BaseException) -> None: ...


class _NoRunSpan:
    def heard(self, happened: RunEvent) -> None: ...
    def ended(self, status: str, error: BaseException | None) -> None: ...


class NoTracing:
    """Tells nobody anything."""

    def called(self, path: str, headers: Mapping[str, str]) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def generation(self, tenant: str) -> Span:  # noqa: ARG002
        return _NoSpan()

    def run(self, tenant: str, run_id: str, workflow: Workflow) -> RunSpan:  # noqa: ARG002
        return _NoRunSpan()


class OpenTelemetry:
    """Tells a tracer provider."""

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

    def generation(self, tenant: str) -> Span:
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
    """Spans go to an OTLP collector, as OpenTelemetry's own `OTEL_…` variables say. Raises `ConfigError` without the
    extra `otel`."""
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
