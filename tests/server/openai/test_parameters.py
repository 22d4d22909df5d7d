"""Parameters of other servers: followed, refused by name, or named in the answer as ignored, in every protocol."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kedge.engine.echo import EchoEngine
from kedge.server.openai.protocol import UNSUPPORTED, ChatBody, CompletionBody
from kedge.types import SamplingParams
from tests.server.conftest import serving
from tests.server.talking import MODEL, PARAMETERS, Talking

ASK = {"messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": ASK,
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {**ASK, "max_tokens": 5},
    "/v1/responses": {"input": "hi"},
}
CHAT, TEXT, MESSAGES, RESPONSES = BODIES
FUNCTION = {"type": "function", "name": "weather", "parameters": PARAMETERS}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
OTHER = {"type": "function", "function": {"name": "other"}}
ANSWERED = {"role": "assistant", "tool_calls": [{"type": "retrieval", "function": {"name": "x"}}]}
NAMED: list[tuple[str, dict[str, Any], str]] = [
    *((CHAT, {"messages": bad}, "messages") for bad in (
        [], [{"role": "robot", "content": "x"}], [{"role": "user", "content": [{"type": 5}]}], [ANSWERED],
    )),
    *((CHAT, {name: bad}, name) for name, bad in (
        ("temperature", -1), ("temperature", "warm"), ("temperature", True), ("top_p", 0), ("n", 0), ("n", 65),
        ("max_tokens", 0), ("max_tokens", 10**9), ("seed", 2**63), ("top_k", -2), ("stream", "yes"),
        ("stop", ""), ("stop", ["x"] * 17), ("logprobs", 1), ("top_logprobs", 2), ("echo", True),
    )),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"kedge": {"reuse": "fast"}}, "kedge.reuse"),
    (CHAT, {"kedge": {"bindings": {"a": 1}}}, "kedge.bindings"),
    (CHAT, {"kedge": {"bindings": {}}}, "messages"),
    (CHAT, {"kedge": {"bindings": {}}, "messages": [], "tools": [WEATHER]}, "tools"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
    (CHAT, {"tools": [WEATHER], "functions": [{"name": "x"}]}, "functions"),
    *((CHAT, {"tools": tools, "tool_choice": bad}, "tool_choice") for tools, bad in (
        ([], "required"), ([WEATHER], "always"), ([WEATHER], OTHER), ([WEATHER], {"type": "function"}),
    )),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format"),
    *((CHAT, {"chat_template_kwargs": {name: "x"}}, f"chat_template_kwargs.{name}") for name in (
        "chat_template", "add_generation_prompt", "tokenize",
    )),
    *((TEXT, {"logprobs": bad}, "logprobs") for bad in (21, -1, True)),
    (TEXT, {"max_tokens": 0}, "max_tokens"),
    (TEXT, {"echo": 1}, "echo"),
    (TEXT, {"kedge": {"bindings": {}}}, "kedge.bindings"),
    (MESSAGES, {"max_tokens": 0}, "max_tokens"),
    (MESSAGES, {"temperature": "hot"}, "temperature"),
    (MESSAGES, {"n": 2}, "n"),
    (MESSAGES, {"stop_sequences": [""]}, "stop_sequences"),
    (MESSAGES, {"output_config": {"format": {"schema": 5}}}, "output_config.format.schema"),
    (MESSAGES, {"tool_choice": {"type": "tool", "name": "other"}, "tools": [{"name": "f"}]}, "tool_choice"),
    (MESSAGES, {"messages": []}, "messages"),
    *((MESSAGES, {"messages": [{"role": role, "content": [bad]}]}, named) for role, bad, named in (
        ("user", {"type": "text"}, "messages.0.content"),
        ("user", {"type": "tool_result", "content": [{"type": 5}]}, "messages.0.content"),
        ("assistant", {"type": "tool_use", "input": {}}, "messages.0.tool_calls.0.function.name"),
    )),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
    (RESPONSES, {"text": {"format": {"type": "xml"}}}, "text.format.type"),
    (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
    (RESPONSES, {"background": True}, "background"),
    (RESPONSES, {"top_logprobs": 3}, "top_logprobs"),
    (RESPONSES, {"tools": [{"type": "function", "name": ""}]}, "tools.name"),
    (RESPONSES, {"tools": [{"type": "namespace", "name": "s", "tools": [{"type": "custom"}]}]}, "tools.name"),
    (RESPONSES, {"tool_choice": {"type": "function", "name": "other"}, "tools": [FUNCTION]}, "tool_choice"),
    (RESPONSES, {"n": 2}, "n"),
    *((RESPONSES, {"input": bad}, named) for bad, named in (
        ([], "input"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input.0.content"),
        ([{"role": "robot", "content": ""}], "input.0.role"),
        ([{"role": "user"}], "input.0.content"),
        ([{"type": "function_call", "name": "f"}], "input.0.call_id"),
    )),
]  # fmt: skip


@pytest.fixture(scope="module")
def http(told: Talking) -> Iterator[httpx.Client]:
    with told.served.http() as opened:
        yield opened


@pytest.mark.parametrize("path", BODIES)
def test_what_would_change_the_answer_is_refused_by_name(http: httpx.Client, path: str) -> None:
    for name in UNSUPPORTED.keys() - (CompletionBody if path == TEXT else ChatBody).model_fields:
        answer = http.post(path, json={**BODIES[path], name: 3})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), answer.text
        for neutral in (None, *UNSUPPORTED[name]):
            assert http.post(path, json={**BODIES[path], name: neutral}).status_code == 200, name


@pytest.mark.parametrize("path", BODIES)
def test_what_is_unknown_is_named_in_the_answer(http: httpx.Client, path: str) -> None:
    many = {f"x{at}": 1 for at in range(100)}
    answer = http.post(path, json={**BODIES[path], "zeal": 1, "enable_thinking": None, "metadata": {}, "user": "u"})
    assert answer.json()["kedge"]["ignored"] == ["zeal", "enable_thinking"]
    assert len(http.post(path, json={**BODIES[path], **many}).json()["kedge"]["ignored"]) == 64
    assert "ignored" not in http.post(path, json={**BODIES[path], "model": MODEL}).json()["kedge"]


def test_a_stream_names_it_too(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={**ASK, "zeal": 1, "stream": True})
    assert '"ignored":["zeal"]' in answer.text


def test_variables_of_the_template_are_set(told: Talking, http: httpx.Client) -> None:
    inner = told.served.engine.tokenizer.inner
    kept = inner.chat_template
    inner.chat_template = "{{ messages[0].content }}|{{ mood }}|{{ reasoning_effort }}|{{ documents }}"
    try:
        more = {"chat_template_kwargs": {"mood": "<|eos|>"}, "reasoning_effort": "low", "documents": [{"text": "d"}]}
        assert http.post("/v1/chat/completions", json={**ASK, **more}).status_code == 200
        assert told.prompt() == "hi|<|eos|>|low|[{'text': 'd'}]" and 257 not in told.request().tokens
        asked = {"input": "hi", "reasoning": {"effort": "high"}}
        assert http.post("/v1/responses", json=asked).status_code == 200 and "|high|" in told.prompt()
    finally:
        inner.chat_template = kept


@pytest.mark.parametrize(("path", "more", "param"), NAMED)
def test_an_error_names_the_field_that_was_sent(http: httpx.Client, path: str, more: Any, param: str) -> None:
    answer = http.post(path, json={**BODIES[path], **more})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), answer.text
    assert answer.json().get("type") == ("error" if path == MESSAGES else None)


def test_the_models_own_sampling_is_the_default_and_a_request_may_change_it() -> None:
    class Own(EchoEngine):
        def inspect(self) -> dict[str, Any]:
            config = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": None, "do_sample": True}
            return {"sampling": SamplingParams.of_model(config)}

    with Own() as engine, serving(engine) as running, running.http() as http:
        for path, body in BODIES.items():
            assert http.post(path, json=body).status_code == 200
            sampling = engine.requests[-1].sampling
            assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 0.95)
            more = {"temperature": 0.0, "top_k": -1, "min_p": 0.1, "presence_penalty": 1.5, "repetition_penalty": 1.1}
            assert http.post(path, json={**body, **more}).status_code == 200
            sampling = engine.requests[-1].sampling
            assert (sampling.temperature, sampling.top_k, sampling.min_p) == (0.0, 0, 0.1)
            assert (sampling.presence_penalty, sampling.repetition_penalty, sampling.top_p) == (1.5, 1.1, 0.95)
