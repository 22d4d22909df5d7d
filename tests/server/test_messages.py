"""What a client is told of a wrong value: the field that it sent, and what is accepted there."""

import json
import math
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kedge.engine.echo import ByteTokenizer, EchoEngine
from kedge.errors import PromptTooLong
from kedge.server.anthropic import MessagesBody
from kedge.server.openai.protocol import ChatBody, CompletionBody
from kedge.server.responses import ResponsesBody
from kedge.server.workflows import RunBody
from kedge.settings import ServerSettings
from tests.server.conftest import FLOW, WEATHER, YAML, serving
from tests.server.test_dialects import BODIES, CHAT, MESSAGES, RESPONSES, TEXT
from tests.tokenizers_of_families import FAMILIES, tokenizer_of

HI = [{"role": "user", "content": "hi"}]
ASK = {"user_question": "?"}
FLOWS, RUNS, HINTS = "/v1/workflows", "/v1/workflows/pair/runs", "/v1/hints"
LEAST: dict[str, dict[str, Any]] = {
    **BODIES,
    FLOWS: {"name": "x", "agents": [{"id": "a", "user": "x"}]},
    RUNS: {"inputs": ASK},
    HINTS: {},
}
PROMPT = "Input should be a string, a list of strings, a list of token ids or a list of lists of token ids"
MOST = "8192 maximum, this model's maximum context length is 8192 tokens"
STOP = "Input should be a string or a list of strings"
PARTS = "Input should be a string or a list of parts (objects with a `type`, and `text` where that is a text)"
MODES = "'off', 'exact' or 'translate'"
REUSE = f"Input should be {MODES}, or an object with one of these for each agent that it names"
NEEDED = "a run needs a text that is not blank"
SHORT_NAME = "must be a printable text of 1 to 256 characters"
TOOL: Any = {"type": "function", "function": WEATHER}
FLAT: Any = {"type": "function", **WEATHER}
OTHER = {"type": "function", "function": {"name": "other"}}
ANSWERED = {"role": "assistant", "tool_calls": [{"type": "retrieval", "function": {"name": "x"}}]}
SCHEMA: Any = {"type": "json_schema"}
ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
BAD_SCHEMAS = ((ENDLESS, "requires itself without an end"), ({"title": "\ud800"}, "must be valid Unicode"))

WRONG: list[tuple[str, object, str | None, str]] = [
    *((TEXT, {"prompt": bad}, "prompt", PROMPT) for bad in ([True], [1, "a"], [[1], "a"], [[True]], [1.5], {}, 5)),
    *((TEXT, {"prompt": bad}, "prompt", said) for bad, said in (
        ("", "prompt='': has no tokens"), ([], "prompt=[]: must not be empty"), ([[]], "prompt=[]: has no tokens"),
        (["a", ""], "prompt='': has no tokens"),
        ([97, 300], "prompt=300: must be from 0 to 258, in the vocabulary of 259"),
        ("x" * 9000, f"prompt='9000 tokens': prompt is too long: 9000 tokens > {MOST}"),
        ("\ud800", "prompt='\\ud800': must be valid Unicode, without lone surrogates"),
    )),
    *((TEXT, {"stop": bad}, "stop", STOP) for bad in (5, ["a", 1], {})),
    *((TEXT, {name: bad}, name, said) for name, bad, said in (
        ("stop", ["a", ""], "stop='': must not be empty"),
        ("stream_options", 5, "stream_options=5: Input should be an object"),
        ("n", 1.5, "n=1.5: Input should be a valid integer"), ("cache_salt", "a\nb", SHORT_NAME),
        ("logprobs", 21, ""), ("logprobs", -1, ""), ("logprobs", True, ""), ("max_tokens", 0, ""), ("echo", 1, ""),
        ("temperature", math.nan, ""), ("temperature", math.inf, ""),
    )),
    (TEXT, {"kedge": {"bindings": {}}}, "kedge.bindings", ""),
    *((path, bad, None, f"body={bad}: Input should be an object") for path, bad in ((TEXT, [1]), (HINTS, 5))),
    *((CHAT, {"messages": bad}, "messages", said) for bad, said in (
        ([5], "messages.0=5: Input should be an object"), ("hi", "messages='hi': Input should be a valid list"),
        *(([{**HI[0], "content": bad}], PARTS) for bad in (5, [5], [{"type": "text"}], [{"type": 5}])),
        ([{**HI[0], "content": "x" * 9000}], f"messages='9018 tokens': prompt is too long: 9018 tokens > {MOST}"),
        ([{"role": "assistant", "tool_calls": [{"function": 5}]}],
         "messages.0.tool_calls.0.function=5: Input should be an object"),
        ([], ""), ([{"role": "robot", "content": "x"}], ""), ([ANSWERED], ""),
    )),
    *((CHAT, {name: bad}, name, "") for name, bad in (
        ("temperature", -1), ("temperature", "warm"), ("temperature", True), ("top_p", 0), ("n", 0), ("n", 65),
        ("max_tokens", 0), ("max_tokens", 10**9), ("seed", 2**63), ("top_k", -2), ("stream", "yes"),
        ("stop", ["x"] * 17), ("logprobs", 1), ("top_logprobs", 2), ("echo", True),
        ("response_format", {"type": "xml"}),
    )),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", ""),
    *((path, {"kedge": {"reuse": "x"}}, "kedge.reuse", "kedge.reuse='x': must be one of off, exact, translate")
      for path in (CHAT, HINTS)),
    (CHAT, {"kedge": {"bindings": {"a": 1}}}, "kedge.bindings", ""),
    (CHAT, {"kedge": {"bindings": {}}}, "messages", ""),
    (CHAT, {"kedge": {"bindings": {}}, "messages": [], "tools": [TOOL]}, "tools", ""),
    (CHAT, {"tools": [{}]}, "tools", "tools.0.type: Field required"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", ""),
    *((CHAT, {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": kind}}}],
              "tool_choice": "required"}, "tools", "parameters must be object") for kind in (5, "string")),
    (CHAT, {"tools": [TOOL], "functions": [{"name": "x"}]}, "functions", ""),
    (CHAT, {"tool_choice": 5}, "tool_choice",
     "tool_choice=5: Input should be none, auto, required or a function (an object)"),
    *((CHAT, {"tools": tools, "tool_choice": bad}, "tool_choice", "") for tools, bad in (
        ([], "required"), ([TOOL], "always"), ([TOOL], OTHER), ([TOOL], {"type": "function"}),
    )),
    (CHAT, {"response_format": SCHEMA}, "response_format.json_schema", "schema"),
    (CHAT, {"response_format": {**SCHEMA, "json_schema": {"schema": 5}}}, "response_format.json_schema.schema",
     "JSON schema"),
    *((path, more, param, said) for bad, said in BAD_SCHEMAS for path, more, param in (
        (CHAT, {"response_format": {**SCHEMA, "json_schema": {"schema": bad}}}, "response_format.json_schema"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": bad}}],
                "tool_choice": "required"}, "tools"),
        (MESSAGES, {"output_config": {"format": {"schema": bad}}}, "output_config.format"),
        (RESPONSES, {"text": {"format": {**SCHEMA, "schema": bad}}}, "text.format"),
    )),
    *((CHAT, {name: bad}, name, f"{name}={bad!r}: {SHORT_NAME}") for name, bad in (
        *((name, bad) for name in ("cache_salt", "extra_key") for bad in (7, "", {}, [], 0.5)), ("extra_key", ["a", 7]),
    )),
    *((path, {name: bad}, name, SHORT_NAME) for path in (CHAT, MESSAGES, RESPONSES, HINTS) for name, bad in (
        ("cache_salt", 7), ("session_id", 7), ("cache_salt", "x" * 5000), ("extra_key", ["x" * 257]),
        ("session_id", "x" * 257),
    )),
    *((MESSAGES, more, param, "") for more, param in (
        ({"max_tokens": 0}, "max_tokens"), ({"temperature": "hot"}, "temperature"), ({"n": 2}, "n"),
        ({"stop_sequences": [""]}, "stop_sequences"), ({"messages": []}, "messages"),
        ({"output_config": {"format": {"schema": 5}}}, "output_config.format.schema"),
        ({"tool_choice": {"type": "tool", "name": "other"}, "tools": [{"name": "f"}]}, "tool_choice"),
        *(({"messages": [{"role": role, "content": [bad]}]}, param) for role, bad, param in (
            ("user", {"type": "text"}, "messages.0.content"),
            ("user", {"type": "tool_result", "content": [{"type": 5}]}, "messages.0.content"),
            ("assistant", {"type": "tool_use", "input": {}}, "messages.0.tool_calls.0.function.name"),
        )),
    )),
    *((RESPONSES, more, param, "") for more, param in (
        ({"max_output_tokens": 0}, "max_output_tokens"), ({"n": 2}, "n"), ({"top_logprobs": 3}, "top_logprobs"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": SCHEMA}}, "text.format.schema"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"), ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools.name"),
        ({"tools": [{"type": "namespace", "name": "s", "tools": [{"type": "custom"}]}]}, "tools.name"),
        ({"tool_choice": {"type": "function", "name": "other"}, "tools": [FLAT]}, "tool_choice"),
        *(({"input": bad}, param) for bad, param in (
            ([], "input"), ([{"role": "user", "content": [{"type": "input_text"}]}], "input.0.content"),
            ([{"role": "robot", "content": ""}], "input.0.role"), ([{"role": "user"}], "input.0.content"),
            ([{"type": "function_call", "name": "f"}], "input.0.call_id"),
        )),
    )),
    (RUNS, {"inputs": 5}, "inputs", "inputs=5: Input should be an object"),
    *((RUNS, {name: bad}, name, "") for name, bad in (("turns", 1), ("stream", "yes"))),
    (RUNS, {"guard": "fast"}, "guard", "guard='fast': Input should be 'off', 'shadow' or 'on'"),
    *((RUNS, {"reuse": bad}, "reuse", REUSE) for bad in (5, "fast", {"first": "fast"}, [])),
    *((RUNS, {"inputs": bad}, param, said) for bad, param, said in (
        ({}, "inputs.user_question", f"inputs.user_question=None: {NEEDED}"),
        *(({"user_question": blank}, "inputs.user_question", f"inputs.user_question={blank!r}: {NEEDED}")
          for blank in ("", " \n")),
        ({"user_question": "\udc00"}, "inputs.user_question",
         "inputs.user_question='\\udc00': has half of a surrogate pair"),
        ({**ASK, "other": "x"}, "inputs", "inputs='other': the workflow has only user_question"),
        ({"user_question": 5}, "inputs", "inputs.user_question=5: Input should be a valid string"),
    )),
    (FLOWS, {"usr": "x"}, "workflow: usr", "workflow: usr='x': there is no such field"),
    (FLOWS, {"topology": 5}, "workflow: topology", "workflow: topology=5: must be a mapping"),
]  # fmt: skip


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with (
        EchoEngine() as engine,
        serving(engine, ServerSettings(tool_call_parser="hermes")) as running,
        running.http() as opened,
    ):
        opened.post(FLOWS, content=FLOW, headers=YAML).raise_for_status()
        yield opened
        assert opened.get("/v1/runs").json()["data"] == []
        running.wait_quiet()
        assert not engine.requests, "nothing of all this came to the engine"


def post(http: httpx.Client, path: str, body: object) -> httpx.Response:
    return http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize(("path", "body", "param", "said"), WRONG)
def test_an_error_names_the_field_that_was_sent_and_what_is_accepted(
    http: httpx.Client, path: str, body: object, param: str | None, said: str
) -> None:
    answer = post(http, path, {**LEAST[path], **body} if isinstance(body, dict) else body)
    error = error_of(answer)
    assert (error["param"], error["type"]) == (param, "invalid_request_error"), answer.text
    assert said in error["message"] and len(error["message"]) < 300
    assert answer.json().get("type") == ("error" if path == MESSAGES else None)


def test_a_header_is_named_as_it_was_sent(http: httpx.Client) -> None:
    error = error_of(http.get("/v1/runs/none/events", headers={"Last-Event-ID": "x"}))
    assert error["param"] == "last-event-id"
    assert error["message"].startswith("last-event-id='x': Input should be a valid integer")


ODD = [None, True, 5, -1, 1.5, "x", "", [], [True], [None], [[]], [[1.5]], [{}], {}, {"x": True}, {"type": 1}]
FIELDS = {
    TEXT: ["prompt", "stop", "stream_options", "logprobs", "seed", "kedge"],
    CHAT: ["messages", "stop", "tools", "tool_choice", "top_logprobs", "parallel_tool_calls"],
    RUNS: ["inputs", "reuse", "guard", "stream"],
}
NOISE = re.compile(r"\bstr\b|\bint\b|list\[|literal\[|function-|dictionary|instance|segments|Segment\(|extract")


@pytest.mark.parametrize(("path", "field"), [(path, field) for path, fields in FIELDS.items() for field in fields])
@pytest.mark.parametrize("value", ODD, ids=str)
def test_no_message_speaks_of_pythons_types(http: httpx.Client, path: str, field: str, value: object) -> None:
    # Another field is wrong in each, so that nothing runs where the value is none that is refused.
    least = {"inputs": {}} if path == RUNS else {**LEAST[path], "n": 0}
    error = error_of(post(http, path, {**least, field: value}))
    assert not NOISE.search(error["message"]), error["message"]
    assert error["message"].startswith((error["param"], "inputs"))


# large bodies ---------------------------------------------------------------------------------------------------------

MANY = 50_000
ONES, NUMBERED = [1] * MANY, {str(at): at for at in range(MANY)}
MANY_WRONG: list[tuple[Any, str, dict[str, Any]]] = [
    *((ChatBody, CHAT, {"messages": bad}) for bad in (
        ONES, [{"role": "user", "content": ONES}], [{"role": "assistant", "tool_calls": ONES}],
    )),
    *((ChatBody, CHAT, {"messages": HI, name: ONES}) for name in ("tools", "stop", "documents")),
    *((CompletionBody, TEXT, {"prompt": bad}) for bad in ([None] * MANY, [[None] * MANY])),
    *((MessagesBody, MESSAGES, {"messages": HI, name: bad}) for name, bad in (
        ("messages", ONES), ("system", ONES), ("tools", [{}] * MANY), ("stop_sequences", ONES),
    )),
    *((ResponsesBody, RESPONSES, body) for body in ({"input": ONES}, {"input": "x", "tools": ONES})),
    *((RunBody, RUNS, body) for body in ({"inputs": NUMBERED}, {"inputs": {}, "reuse": NUMBERED})),
]  # fmt: skip


@pytest.mark.parametrize(("model", "path", "body"), MANY_WRONG)
def test_a_wrong_list_ends_at_its_first_wrong_item(
    http: httpx.Client, model: Any, path: str, body: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="validation error") as caught:
        model.model_validate(body)
    assert len(caught.value.errors()) <= 8  # one for each member of a union
    answer = post(http, path, body)
    assert answer.status_code == 400 and len(answer.text) < 1500, answer.text


@pytest.mark.parametrize("size", [10, 200_000])
def test_a_long_body_is_read_in_another_thread(http: httpx.Client, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()

    def loads(*given: Any, **more: Any) -> Any:
        threads.add(threading.current_thread().name)
        return kept(*given, **more)

    kept = json.loads
    monkeypatch.setattr("json.loads", loads)
    error_of(post(http, CHAT, {"messages": [{**HI[0], "content": "x" * size}], "n": 0}))
    assert any(name.startswith("kedge-work") for name in threads) == (size > 10)


# length ---------------------------------------------------------------------------------------------------------------

LONG = "a " * 200_000


class OnlyShort:
    """Takes part in tokenizing, and fails for long texts."""

    @staticmethod
    def split(text: str) -> list[str]:
        assert len(text) < 1000
        return [text]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"prompt": LONG}, "prompt"),
        (TEXT, {"prompt": ["a", LONG]}, "prompt"),
        (CHAT, {"messages": [{**HI[0], "content": LONG}]}, "messages"),
        (CHAT, {"messages": HI * 100_000}, "messages"),
        (MESSAGES, {"messages": [{**HI[0], "content": LONG}], "max_tokens": 5}, "messages"),
        (MESSAGES, {"messages": HI, "system": LONG, "max_tokens": 5}, "messages"),
        (RESPONSES, {"input": LONG}, "input"),
        (CHAT, {"messages": [], "kedge": {"workflow": "pair", "agent": "first", "bindings": {"user_question": LONG}}},
         "kedge.bindings"),
        (RUNS, {"inputs": {"user_question": LONG}}, "inputs.user_question"),
    ],
)  # fmt: skip
def test_what_is_far_too_long_is_not_tokenized(
    http: httpx.Client, path: str, body: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByteTokenizer, "_special", OnlyShort)
    answer = post(http, path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    if path != MESSAGES:
        assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("family", FAMILIES)
def test_only_a_part_of_a_long_text_is_tokenized(family: str) -> None:
    tokenizer = tokenizer_of(family)
    tokenizer.most = 100
    for text in (LONG, "x" * 100_000, "é∆" * 50_000, "<s>" * 50_000):
        with pytest.raises(PromptTooLong) as caught:
            tokenizer.measure(text)
        whole = len(tokenizer.inner.encode(text, add_special_tokens=False))
        assert caught.value.most == 100 and 0.5 * whole < caught.value.tokens < 2 * whole
    for text in ("Hello there " * 20, " " * 150, "rains and rains"):
        tokenizer.measure(text)
