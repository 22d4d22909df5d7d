"""Spans as OpenTelemetry's own SDK sees them."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from kedge.engine.echo import EchoEngine
from kedge.errors import ConfigError
from kedge.server.app import create_app
from kedge.server.config import ServerConfig
from kedge.server.tracing import OpenTelemetry, exporting
from tests.server.conftest import Served, serving, wait_until

sdk = pytest.importorskip("opentelemetry.sdk.trace")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans() -> Any:
    return memory.InMemorySpanExporter()


@pytest.fixture
def traced(spans: Any) -> Iterator[Served]:
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(spans))
    config = ServerConfig()
    with EchoEngine() as engine, serving(engine, config, tracing=OpenTelemetry(provider, config.model_name)) as running:
        yield running


def finished(spans: Any, count: int) -> list[Any]:
    wait_until(lambda: len(spans.get_finished_spans()) >= count)
    return list(spans.get_finished_spans())


def test_a_call_is_a_span_below_its_callers(traced: Served, spans: Any) -> None:
    client = traced.client()
    client.chat.completions.create(
        model="kedge-nano",
        messages=[{"role": "user", "content": "secret words"}],
        max_tokens=5,
        temperature=0.5,
        seed=3,
        stop=["!"],
        extra_headers={"traceparent": PARENT},
        extra_body={"kedge": {"workflow": "w", "agent": "judge", "run": "r1", "reuse": "exact"}},
    )
    (span,) = finished(spans, 1)
    assert (span.name, span.kind.name, span.status.is_ok) == ("chat kedge-nano", "SERVER", True)
    assert f"{span.parent.span_id:016x}" in PARENT
    told = dict(span.attributes)
    tokens = {key: told.pop(key) for key in list(told) if key.startswith(("kedge.prompt_tokens.", "gen_ai.usage"))}
    assert told == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kedge",
        "gen_ai.request.model": "kedge-nano",
        "gen_ai.response.model": "kedge-nano",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.seed": 3,
        "gen_ai.request.stop_sequences": ("!",),
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.agent.name": "judge",
        "gen_ai.conversation.id": "/r1",
        "kedge.workflow": "w",
        "kedge.reuse": "exact",
        "kedge.tenant": "default",
    }
    prompt = tokens.pop("gen_ai.usage.input_tokens")
    assert tokens.pop("gen_ai.usage.output_tokens") == 5
    assert sum(tokens.values()) == prompt > 0
    assert [event.name for event in span.events] == ["gen_ai.first_token"]
    assert "secret" not in str(span.to_json())


def test_choices_of_one_call_are_one_span(traced: Served, spans: Any) -> None:
    traced.client().completions.create(model="kedge-nano", prompt="abc", n=3, max_tokens=2)
    (span,) = finished(spans, 1)
    assert (span.name, span.parent) == ("text_completion kedge-nano", None)
    assert span.attributes["gen_ai.request.choice.count"] == 3
    assert span.attributes["gen_ai.usage.output_tokens"] == 6
    assert span.attributes["gen_ai.usage.input_tokens"] == 9
    assert len(span.events) == 3


def test_a_call_that_the_engine_refuses_is_a_failed_span(traced: Served, spans: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        traced.client().completions.create(model="kedge-nano", prompt=[9999])
    (span,) = finished(spans, 1)
    assert (span.status.is_ok, span.attributes["error.type"]) == (False, "InvalidToken")


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def missing(name: str, *args: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError("no", name=name)
        return original(name, *args)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"kedge\[otel\]"):
        exporting("model")
    create_app(EchoEngine())


def test_exporting_builds_with_the_real_packages() -> None:
    assert isinstance(exporting("model"), OpenTelemetry)
