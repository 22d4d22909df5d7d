"""Structured output on the bundled model: whatever it would rather say, its answers conform."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import StrEnum
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from kedge import LocalEngine
from kedge.engine.local import requests, sampler
from kedge.settings import EngineSettings, ServerSettings
from tests.server.conftest import MODEL, TEMPLATE, Served, serving

ASK: Any = [{"role": "user", "content": "Which one?"}]


class Size(StrEnum):
    SMALL, LARGE = "small", "large"


class Closed(BaseModel):
    """Without other fields, which a model may add without end."""

    model_config = ConfigDict(extra="forbid")


class Part(Closed):
    size: Size
    count: int = Field(ge=1, le=99)


class Order(Closed):
    """Parts are defined once and referred to, as pydantic does."""

    first: Part
    second: Part


PARAMETERS = Order.model_json_schema()
TOOLS: Any = [
    {"type": "function", "function": {"name": "order", "parameters": PARAMETERS, "strict": True}},
    {"type": "function", "function": {"name": 'say "no"\\\n', "parameters": {"type": "object", "maxProperties": 0}}},
]
WRONG = 'So:\n<tool_call>\n{"name": "order", "arguments": {"first": "me"}}\n</tool_call>'
ODD = {"name": "f", "strict": True, "parameters": {"properties": {"x": {"type": "string", "pattern": "(?=x)"}}}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with LocalEngine(config=EngineSettings(device="cpu")) as engine:
        engine.tokenizer.inner.chat_template = TEMPLATE
        with serving(engine, ServerSettings(tool_call_parser="hermes")) as running:
            yield running


def wanting(served: Served, patch: pytest.MonkeyPatch, text: str) -> None:
    """Make a text the likeliest answer to the next question: only a grammar can forbid it."""
    left, end = iter(served.engine.tokenizer.encode(text, special=False)), served.engine.tokenizer.eos_token_id

    def draw(logits: Any, samplers: Any) -> Any:
        logits[:, next(left, end)] = 1e6
        return sampler.draw_tokens(logits, samplers)

    patch.setattr(requests, "draw_tokens", draw)


@pytest.mark.parametrize("seed", range(8))
def test_a_schema_is_followed_however_tokens_are_drawn(client: openai.OpenAI, seed: int) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Order, temperature=2, seed=seed, max_tokens=200
    )
    assert answer.choices[0].finish_reason == "stop"
    parsed = answer.choices[0].message.parsed
    assert parsed is not None and 1 <= parsed.second.count <= 99
    assert "\n" not in (answer.choices[0].message.content or "")


@pytest.mark.parametrize("seed", range(8))
def test_a_call_is_forced(client: openai.OpenAI, seed: int) -> None:
    asked: Any = {"model": MODEL, "messages": ASK, "temperature": 1.5, "max_tokens": 300, "seed": seed}
    asked |= {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(**asked) as events:
        answer = events.get_final_completion().choices[0]
    assert answer.finish_reason == "tool_calls" and not answer.message.content
    [call] = [one.function for one in answer.message.tool_calls]
    if call.name == "order":
        Order.model_validate_json(call.arguments)
    else:
        assert (call.name, json.loads(call.arguments)) == (TOOLS[1]["function"]["name"], {})


def test_strict_calls_conform_and_texts_beside_them_stay(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, loose = served.client().chat.completions.create, {**TOOLS[0]["function"], "strict": False}
    both: Any = [{"type": "function", "function": loose}], TOOLS[:1]
    for at in range(6):
        asked: Any = {"model": MODEL, "messages": ASK, "temperature": at / 4, "seed": at, "max_tokens": 200}
        free, bound = (ask(**asked, tools=tools).choices for tools in both)
        assert bound == free and free[0].message.content
    for tools in both:
        wanting(served, monkeypatch, WRONG)
        message = ask(**asked, tools=tools).choices[0].message
        arguments = message.tool_calls[0].function.arguments
        assert message.content == "So:" and (arguments == '{"first": "me"}') == (tools is both[0])
    Order.model_validate_json(arguments)


def test_responses_follow_a_schema_and_call_tools(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    client = served.client()
    assert client.responses.parse(model=MODEL, input="Which one?", text_format=Order).output_parsed
    tool: Any = {"type": "function", "name": "order", "parameters": PARAMETERS, "strict": True}
    for choice in ("auto", "required", {"type": "function", "name": "order"}):
        wanting(served, monkeypatch, WRONG)
        asked: Any = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
        *said, item = client.responses.create(model=MODEL, input="Which one?", **asked).output
        assert item.type == "function_call" and len(said) == (choice == "auto")
        Order.model_validate_json(item.arguments)


def test_messages_follow_a_schema_and_call_tools(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    client = served.claude()
    tool: Any = {"name": "order", "input_schema": PARAMETERS, "strict": True}
    for kind in ({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "order"}):
        wanting(served, monkeypatch, WRONG)
        choice: Any = {**kind, "disable_parallel_tool_use": True}
        answer = client.messages.create(model=MODEL, max_tokens=300, messages=ASK, tools=[tool], tool_choice=choice)
        assert answer.stop_reason == "tool_use"
        Order.model_validate(answer.content[-1].input)
    wanted: Any = {"format": {"type": "json_schema", "schema": PARAMETERS}}
    text = client.messages.create(model=MODEL, max_tokens=300, messages=ASK, output_config=wanted).content[0].text
    Order.model_validate_json(text)


def test_many_at_once_each_with_its_own_grammar(client: openai.OpenAI) -> None:
    """In a batch, an answer is what it is alone, and answers without a grammar are free."""

    def ask(at: int) -> str | None:
        schema = {"const": f"number {at}"} if at % 2 else None
        wanted: Any = form(schema) if schema else openai.omit
        answer = client.chat.completions.create(
            model=MODEL, messages=ASK, max_tokens=40, temperature=0, response_format=wanted
        )
        return answer.choices[0].message.content

    alone = ask(0)
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(ask, range(32)))
    assert answers == [f'"number {at}"' if at % 2 else alone for at in range(32)]


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"response_format": form({"type": "wat"})}, "Invalid type: wat"),
        ({"response_format": form({"$ref": "http://127.0.0.1/x"})}, "not present"),
        ({"response_format": form({"type": "string", "pattern": "(?=x)"})}, "look-around"),
        ({"response_format": form({"const": "x" * 300_000})}, "at most"),
        ({"tools": [{"type": "function", "function": ODD}]}, "look-around"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_cannot_be_followed_is_named(http: httpx.Client, fields: dict[str, Any], why: str) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 5, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].endswith(next(iter(fields))) and why in error["message"], error


def test_the_server_goes_on_after_hostile_schemas(client: openai.OpenAI) -> None:
    nested: dict[str, Any] = {"type": "object"}
    for _ in range(200):
        nested = {"type": "object", "properties": {"a": nested, "b": {"type": "string", "pattern": "(a|b|ab){1,40}"}}}

    def ask(_: int) -> None:
        with suppress(openai.BadRequestError, openai.InternalServerError):
            client.chat.completions.create(model=MODEL, messages=ASK, response_format=form(nested), max_tokens=50)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    assert client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=5).choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_no_answer_fits_is_a_bad_request(http: httpx.Client, stream: bool) -> None:
    both = {"properties": {"a": {"type": "integer"}}, "patternProperties": {"a": {"type": "string"}}}
    schema = {"type": "object", **both, "required": ["a"]}
    body = {"messages": ASK, "response_format": form(schema), "max_tokens": 30, "stream": stream}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("response_format"), answer.text
    assert "Parser" not in answer.text and "<state>" not in answer.text


def test_a_stream_that_cannot_go_on_names_the_field_that_was_sent(http: httpx.Client) -> None:
    many = [{"type": "array", "minItems": 2, "items": {"enum": [at]}} for at in range(2200)]
    items = [{"type": "boolean"}, {"anyOf": many}]  # too many for llguidance, once the first is written
    wanted = form({"type": "array", "minItems": 2, "prefixItems": items})
    for path, field, more in (
        ("chat/completions", "response_format", {"messages": ASK, "response_format": wanted}),
        ("messages", "output_config.format", {"messages": ASK, "output_config": {"format": wanted["json_schema"]}}),
        ("responses", "text.format", {"input": "?", "text": {"format": {**wanted, **wanted["json_schema"]}}}),
    ):
        answer = http.post(f"/v1/{path}", json={**more, "stream": True}).text
        error = next(line for line in answer.splitlines() if '"error":{' in line and "cannot go on" in line)
        kind = "invalid_prompt" if path == "responses" else "invalid_request_error"
        assert kind in error and f"{field}='…'" in error


KEPT = {"type": "object", "properties": {"not": {"type": "integer", "maximum": 3}}, "required": ["not"]}


@pytest.mark.parametrize(
    ("more", "ignored"),
    [
        ({}, []),
        ({"properties": {"not": {"type": "string", "format": "password", "maxLength": 3}}}, []),
        ({"properties": {"not": {"type": "string", "format": "uri-reference", "maxLength": 3}}}, []),
        ({"if": {"properties": {}}, "then": {}}, ["if", "then"]),
        ({"properties": {"not": {"enum": [{"uniqueItems": 1}]}}}, []),
        ({"properties": {"not": {"type": "array", "uniqueItems": True, "maxItems": 1, "items": {"const": 1}}}},
         ["uniqueItems"]),
    ],
)  # fmt: skip
def test_what_a_grammar_cannot_keep_is_named(http: httpx.Client, more: Any, ignored: list[str]) -> None:
    schema = {**KEPT, "additionalProperties": False, **more}
    body = {"messages": ASK, "response_format": form(schema), "max_tokens": 60, "temperature": 0}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["kedge"].get("ignored", []) == [f"response_format.{one}" for one in ignored]
    assert "not" in json.loads(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    "parameters", [{}, {"properties": {"x": {"const": "a</tool_call>b"}}, "required": ["x"]}, None]
)
def test_the_arguments_of_a_call_are_an_object_whatever_its_schema_says(client: openai.OpenAI, parameters: Any) -> None:
    given = {} if parameters is None else {"parameters": {**parameters, "additionalProperties": False}}
    tool = {"type": "function", "function": {"name": "f", **given}}
    for _ in range(3):
        answer = client.chat.completions.create(
            model=MODEL, messages=ASK, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=120
        )
        if answer.choices[0].finish_reason != "length":
            (call,) = answer.choices[0].message.tool_calls
            assert isinstance(json.loads(call.function.arguments), dict)
