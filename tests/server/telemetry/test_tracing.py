"""Spans as OpenTelemetry's own SDK sees them."""

import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from kedge.engine.echo import EchoEngine
from kedge.errors import ConfigError
from kedge.server.app import create_app
from kedge.settings import ServerSettings
from tests.server.conftest import FLOW, YAML, Served, serving, wait_until

sdk = pytest.importorskip("opentelemetry.sdk.trace")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
from kedge.server.tracing import OpenTelemetry  # noqa: E402

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans() -> Any:
    return memory.InMemorySpanExporter()


TOOLS = """
name: coders
agents:
  - {id: writer, system: You write., user: "Q: {user_question}", tool: python, max_tokens: 40}
  - {id: reader, system: You read., user: "{condition_writer_current}", max_tokens: 4, reuse: exact}
"""
SECRET = "print(6 * 7)  # secret"


@pytest.fixture
def traced(spans: Any) -> Iterator[Served]:
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(spans))
    config = ServerSettings(tools=True)
    with (
        EchoEngine({"writer": f"```python\n{SECRET}\n```", "reader": "42"}, delay_s=0.002) as engine,
        serving(engine, config, tracing=OpenTelemetry(provider, "kedge-nano")) as running,
    ):
        yield running


def finished(spans: Any, count: int) -> list[Any]:
    wait_until(lambda: len(spans.get_finished_spans()) >= count)
    return list(spans.get_finished_spans())


def test_a_call_is_a_span_below_its_callers(traced: Served, spans: Any) -> None:
    hints = {"kedge": {"workflow": "w", "agent": "judge", "run": "r1", "reuse": "exact"}}
    messages = [{"role": "user", "content": "secret words"}]
    sampling = {"max_tokens": 5, "temperature": 0.5, "seed": 3, "stop": ["!"]}
    sent = {"extra_headers": {"traceparent": PARENT}, "extra_body": hints}
    traced.client().chat.completions.create(model="kedge-nano", messages=messages, **sampling, **sent)
    (span,) = finished(spans, 1)
    assert (span.name, span.kind.name, span.status.is_ok) == ("chat kedge-nano", "SERVER", True)
    assert f"{span.parent.span_id:016x}" in PARENT
    told = dict(span.attributes)
    tokens = {key: told.pop(key) for key in list(told) if key.startswith(("kedge.prompt_tokens.", "gen_ai.usage"))}
    assert told == {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "kedge",
        "gen_ai.request.model": "kedge-nano", "gen_ai.response.model": "kedge-nano",
        "gen_ai.request.max_tokens": 5, "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 1.0,
        "gen_ai.request.seed": 3, "gen_ai.request.stop_sequences": ("!",),
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.agent.name": "judge", "gen_ai.conversation.id": "r1",
        "kedge.workflow": "w", "kedge.reuse": "exact", "kedge.tenant": "default",
    }  # fmt: skip
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
    assert all(span.start_time <= event.timestamp <= span.end_time for event in span.events)


def test_a_call_that_the_engine_refuses_is_a_failed_span(traced: Served, spans: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        traced.client().completions.create(model="kedge-nano", prompt=[9999])
    (span,) = finished(spans, 1)
    assert (span.status.is_ok, span.attributes["error.type"]) == (False, "InvalidToken")


# runs of the server's own --------------------------------------------------------------------------------------------


def start(traced: Served, flow: str, **inputs: str) -> str:
    """Runs a workflow to its end; how it ended."""
    with traced.http() as http:
        name = http.post("/v1/workflows", content=flow, headers=YAML).json()["id"]
        body = {"inputs": inputs, "stream": True}
        text = http.post(f"/v1/workflows/{name}/runs", json=body, headers={"traceparent": PARENT}).text
    return text.rpartition("event: ")[2].partition("\n")[0]


def test_a_run_is_a_span_with_its_agents_and_tools_below_it(traced: Served, spans: Any) -> None:
    assert start(traced, TOOLS, user_question="secret question") == "finished"
    by_name = {span.name: span for span in finished(spans, 4)}
    assert list(by_name) == ["invoke_agent writer", "execute_tool answer_as_python", "invoke_agent reader",
                             "invoke_workflow coders"]  # fmt: skip
    *children, run = by_name.values()
    assert f"{run.parent.span_id:016x}" in PARENT
    assert {span.parent.span_id for span in children} == {run.context.span_id}
    assert all(span.status.status_code.name == "UNSET" for span in by_name.values())
    conversation = run.attributes["gen_ai.conversation.id"]
    in_run = {"gen_ai.provider.name": "kedge", "gen_ai.conversation.id": conversation}
    assert dict(run.attributes) == {
        **in_run, "gen_ai.operation.name": "invoke_workflow", "gen_ai.workflow.name": "coders",
        "kedge.tenant": "default", "kedge.run.status": "finished",
    }  # fmt: skip
    writer, tool, reader = children
    assert dict(tool.attributes) == {
        **in_run, "gen_ai.operation.name": "execute_tool", "gen_ai.agent.name": "writer",
        "gen_ai.tool.name": "answer_as_python", "gen_ai.tool.type": "function",
        "kedge.workflow": "coders", "kedge.turn": 0,
    }  # fmt: skip
    assert writer.end_time <= tool.start_time < tool.end_time <= reader.start_time < reader.end_time <= run.end_time
    assert [event.name for event in reader.events] == ["gen_ai.first_token"]
    prompt = traced.engine.requests[-1].prompt_tokens
    said = {"gen_ai.request.max_tokens": 4, "gen_ai.usage.input_tokens": prompt, "gen_ai.usage.output_tokens": 2}
    assert said.items() | {"kedge.reuse": "exact"}.items() <= reader.attributes.items()
    assert "secret" not in "".join(span.to_json() for span in by_name.values())


def test_a_run_that_fails_fails_with_what_it_left_unanswered(traced: Served, spans: Any) -> None:
    assert start(traced, TOOLS, user_question="x" * 9000) == "failed"
    (run,) = finished(spans, 1)
    assert (run.status.status_code.name, run.attributes["error.type"]) == ("ERROR", "PromptTooLong")
    assert run.attributes["kedge.run.status"] == "failed"
    spans.clear()
    slow = TOOLS.replace("tool: python", "tool: python, tool_seconds: 0.001")
    assert start(traced, slow, user_question="secret") == "failed"
    writer, tool, run = finished(spans, 3)
    assert (writer.name, writer.status.status_code.name) == ("invoke_agent writer", "UNSET")
    assert [span.name for span in (tool, run)] == ["execute_tool answer_as_python", "invoke_workflow coders"]
    for span in (tool, run):
        assert (span.status.status_code.name, span.attributes["error.type"]) == ("ERROR", "ToolError")
        assert "secret" not in span.to_json(), "the error's own text has the answer in it"


def test_a_run_that_is_cancelled_ends_its_spans(traced: Served, spans: Any) -> None:
    with traced.http() as http:
        http.post("/v1/workflows", content=FLOW, headers=YAML)
        run = http.post("/v1/workflows/pair/runs", json={"inputs": {"user_question": "x" * 2000}}).json()["id"]
        wait_until(lambda: bool(traced.engine.requests))
        assert http.post(f"/v1/runs/{run}/cancel").status_code == 202
    agent, ended = finished(spans, 2)
    assert [agent.name, ended.name] == ["invoke_agent first", "invoke_workflow pair"]
    assert ended.attributes["kedge.run.status"] == "cancelled"
    assert {span.status.status_code.name for span in (agent, ended)} == {"UNSET"}


# without it -----------------------------------------------------------------------------------------------------------


def test_a_server_whose_settings_ask_for_tracing_exports_and_without_the_extra_the_error_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with EchoEngine() as engine:
        assert isinstance(create_app(engine, ServerSettings(tracing=True)).state.service.tracing, OpenTelemetry)
        monkeypatch.delitem(sys.modules, "kedge.server.tracing")
        monkeypatch.setitem(sys.modules, "opentelemetry", None)
        with pytest.raises(ConfigError, match=r"kedge\[otel\]"):
            create_app(engine, ServerSettings(tracing=True))
        create_app(engine)
