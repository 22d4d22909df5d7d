"""Spans of generations for OpenTelemetry, with the attributes of its conventions for generative AI.

A span is a child of the one that the caller's `traceparent` header names. It has no text of prompts or answers. The
extra `otel` is needed only where tracing is on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from kedge.errors import ConfigError
from kedge.types import Completion, GenerateRequest, Source

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer, TracerProvider

CHAT = "/v1/chat/completions"
FIRST_TOKEN = "gen_ai.first_token"
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


class Tracing(Protocol):
    """Where spans go."""

    def called(self, path: str, headers: Mapping[str, str]) -> AbstractContextManager[None]:
        """While a call of `path` is answered: spans begin below the caller's."""

    def generation(self, tenant: str) -> Span:
        """A call's generations are about to be submitted."""


class _NoSpan:
    def submitting(self, requests: Sequence[GenerateRequest]) -> Sequence[GenerateRequest]:
        return requests

    def begun(self) -> None: ...
    def ended(self, completions: Sequence[Completion]) -> None: ...
    def failed(self, error: BaseException) -> None: ...


class NoTracing:
    """Tells nobody anything."""

    def called(self, path: str, headers: Mapping[str, str]) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def generation(self, tenant: str) -> Span:  # noqa: ARG002
        return _NoSpan()


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

        operation = str(context.get_value(_OPERATION))
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "kedge",
            "gen_ai.request.model": self._model_name,
            "kedge.tenant": tenant,
        }
        span = self._tracer.start_span(f"{operation} {self._model_name}", kind=SpanKind.SERVER, attributes=attributes)
        return _GenerationSpan(span, self._model_name)


class _GenerationSpan:
    def __init__(self, span: OtelSpan, model_name: str) -> None:
        self._span, self._model_name = span, model_name

    def submitting(self, requests: Sequence[GenerateRequest]) -> Sequence[GenerateRequest]:
        first, sampling = requests[0], requests[0].sampling
        self._set(
            {
                "gen_ai.request.max_tokens": sampling.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.seed": sampling.seed,
                "gen_ai.request.stop_sequences": list(sampling.stop) or None,
                "gen_ai.request.choice.count": len(requests) if len(requests) > 1 else None,
                "gen_ai.agent.name": first.agent or None,
                "gen_ai.conversation.id": first.run or None,
                "kedge.workflow": first.workflow or None,
                "kedge.reuse": first.reuse.value,
            }
        )
        return requests

    def begun(self) -> None:
        self._span.add_event(FIRST_TOKEN)

    def ended(self, completions: Sequence[Completion]) -> None:
        by_source = {
            f"kedge.prompt_tokens.{source}": sum(one.receipt.tokens(source) for one in completions) for source in Source
        }
        self._set(
            {
                "gen_ai.response.model": self._model_name,
                "gen_ai.response.finish_reasons": [one.finish_reason.value for one in completions] or None,
                "gen_ai.usage.input_tokens": sum(one.receipt.prompt_tokens for one in completions),
                "gen_ai.usage.output_tokens": sum(len(one.tokens) for one in completions),
                **by_source,
            }
        )
        self._span.end()

    def failed(self, error: BaseException) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._set({"error.type": type(error).__name__})
        self._span.set_status(Status(StatusCode.ERROR, str(error)))
        self._span.end()

    def _set(self, attributes: Mapping[str, Any]) -> None:
        self._span.set_attributes({key: value for key, value in attributes.items() if value is not None})


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
