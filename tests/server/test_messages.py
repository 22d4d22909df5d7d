"""What a client is told of a wrong value: the field that it sent, and what is accepted there."""

from __future__ import annotations

import json
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
from kedge.server.workflows.routes import RunBody
from kedge.settings import ServerSettings
from tests.server.conftest import FLOW, YAML, serving
from tests.tokenizers_of_families import FAMILIES, tokenizer_of

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
FLOWS, RUNS, HINTS = "/v1/workflows", "/v1/workflows/pair/runs", "/v1/hints"
HI = [{"role": "user", "content": "hi"}]
ASK = {"user_question": "?"}
PROMPT = "prompt: Input should be a string, a list of strings, a list of token ids or a list of lists of token ids"
MOST = "this model's maximum context length is 8192 tokens"
STOP = "stop: Input should be a string or a list of strings"
PARTS = (
    "messages.0.content: Input should be a string or a list of parts (objects with a `type`, and `text` where that "
    "is a text)"
)
MODES = "'off', 'exact' or 'translate'"
REUSE = f"reuse: Input should be {MODES}, or an object with one of these for each agent that it names"
MODES = "must be one of off, exact, translate"
SHORT_NAME = "must be a printable text of 1 to 256 characters"
HALF = "must be valid Unicode, without lone surrogates"

WRONG: list[tuple[str, object, str | None, str]] = [
    *((TEXT, {"prompt": bad}, "prompt", PROMPT) for bad in ([True], [1, "a"], [[1], "a"], [[True]], [1.5], {}, 5)),
    (TEXT, {}, "prompt", "prompt: Field required"),
    (TEXT, {"prompt": ""}, "prompt", "prompt='': has no tokens"),
    (TEXT, {"prompt": []}, "prompt", "prompt=[]: must not be empty"),
    (TEXT, {"prompt": [[]]}, "prompt", "prompt=[]: has no tokens"),
    (TEXT, {"prompt": ["a", ""]}, "prompt", "prompt='': has no tokens"),
    (TEXT, {"prompt": [97, 300]}, "prompt", "prompt=300: must be from 0 to 258, in the vocabulary of 259"),
    (TEXT, {"prompt": "x" * 9000}, "prompt", f"prompt='9000 tokens': {MOST}"),
    (TEXT, {"prompt": "\ud800"}, "prompt", f"prompt='\\ud800': {HALF}"),
    *((TEXT, {"prompt": "x", "stop": bad}, "stop", STOP) for bad in (5, ["a", 1], {})),
    (TEXT, {"prompt": "x", "stop": ["a", ""]}, "stop", "stop='': must not be empty"),
    (TEXT, {"prompt": "x", "stream_options": 5}, "stream_options", "stream_options: Input should be an object"),
    (TEXT, {"prompt": "x", "n": 1.5}, "n", "n: Input should be a valid integer"),
    (TEXT, [1], None, "body: Input should be an object"),
    (CHAT, {"messages": [5]}, "messages", "messages.0: Input should be an object"),
    (CHAT, {"messages": "hi"}, "messages", "messages: Input should be a valid list"),
    *((CHAT, {"messages": [{**HI[0], "content": bad}]}, "messages", PARTS) for bad in (5, [5], [{"type": "text"}])),
    (CHAT, {"messages": [{**HI[0], "content": "x" * 9000}]}, "messages",
     f"messages='9018 tokens': {MOST}"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": 5}]}]}, "messages",
     "messages.0.tool_calls.0.function: Input should be an object"),
    (CHAT, {"messages": HI, "tool_choice": 5}, "tool_choice",
     "tool_choice: Input should be none, auto, required or a function (an object)"),
    (CHAT, {"messages": HI, "tools": [{}]}, "tools", "tools.0.type: Field required"),
    (CHAT, {"messages": HI, "kedge": {"reuse": 5}}, "kedge.reuse", f"kedge.reuse=5: {MODES}"),
    (HINTS, 5, None, "body: Input should be an object"),
    *((path, {**body, name: bad}, name, f"{name}={bad!r}: {SHORT_NAME}") for path, body, name, bad in (
        *((CHAT, {"messages": HI}, name, bad) for name in ("cache_salt", "extra_key") for bad in (7, "", {}, [], 0.5)),
        (CHAT, {"messages": HI}, "extra_key", ["a", 7]),
        (TEXT, {"prompt": "x"}, "cache_salt", "a\nb"),
        (MESSAGES, {"messages": HI, "max_tokens": 5}, "cache_salt", 7),
        (RESPONSES, {"input": "x"}, "cache_salt", 0),
        (HINTS, {}, "cache_salt", 7),
        (CHAT, {"messages": HI}, "session_id", 7),
    )),
    (RUNS, {"inputs": 5}, "inputs", "inputs: Input should be an object"),
    *((RUNS, {"inputs": ASK, "reuse": bad}, "reuse", REUSE) for bad in (5, "fast", {"first": "fast"}, [])),
    (FLOWS, {"name": "x", "agents": [{"id": "a", "user": "x"}], "topology": 5}, "workflow: topology",
     "workflow: topology=5: Input should be a mapping"),
]  # fmt: skip


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with EchoEngine() as engine, serving(engine, ServerSettings()) as running, running.http() as opened:
        opened.post(FLOWS, content=FLOW, headers=YAML).raise_for_status()
        yield opened
        running.wait_quiet()
        assert not engine.requests, "nothing of all this came to the engine"


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, HINTS])
def test_a_long_name_that_separates_caches_is_refused(http: httpx.Client, path: str) -> None:
    asked = {RESPONSES: {"input": "x"}, HINTS: {}}.get(path, {"messages": HI, "max_tokens": 5})
    for name, bad in (("cache_salt", "x" * 5000), ("extra_key", ["x" * 257]), ("session_id", "x" * 257)):
        error = error_of(post(http, path, {**asked, name: bad}))
        assert error.get("param") == name and SHORT_NAME in error["message"] and len(error["message"]) < 200


def post(http: httpx.Client, path: str, body: object) -> httpx.Response:
    return http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize(("path", "body", "param", "message"), WRONG)
def test_an_error_names_the_field_and_what_is_accepted(
    http: httpx.Client, path: str, body: object, param: str | None, message: str
) -> None:
    error = error_of(post(http, path, body))
    assert (error["param"], error["message"]) == (param, message)


def test_a_header_is_named_as_it_was_sent(http: httpx.Client) -> None:
    error = error_of(http.get("/v1/runs/none/events", headers={"Last-Event-ID": "x"}))
    assert error["param"] == "last-event-id"
    assert error["message"].startswith("last-event-id: Input should be a valid integer")


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
    least = {TEXT: {"prompt": "x", "n": 0}, CHAT: {"messages": HI, "n": 0}, RUNS: {"inputs": {}}}[path]
    error = error_of(post(http, path, {**least, field: value}))
    assert not NOISE.search(error["message"]), error["message"]
    assert error["message"].startswith((error["param"], "inputs"))


# the inputs of a run --------------------------------------------------------------------------------------------------

NEEDED = "a run needs a text that is not blank"
INPUTS = [
    ({}, "inputs.user_question", f"inputs.user_question=None: {NEEDED}"),
    ({"user_question": ""}, "inputs.user_question", f"inputs.user_question='': {NEEDED}"),
    ({"user_question": " \n"}, "inputs.user_question", f"inputs.user_question=' \\n': {NEEDED}"),
    (
        {"user_question": "\udc00"},
        "inputs.user_question",
        "inputs.user_question='\\udc00': has half of a surrogate pair",
    ),
    ({**ASK, "other": "x"}, "inputs", "inputs='other': the workflow has only user_question"),
    ({"user_question": 5}, "inputs", "inputs.user_question: Input should be a valid string"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("inputs", "param", "message"), INPUTS)
def test_wrong_inputs_are_refused_before_a_run_begins(
    http: httpx.Client, inputs: object, param: str, message: str, stream: bool
) -> None:
    error = error_of(post(http, RUNS, {"inputs": inputs, "stream": stream}))
    assert (error["param"], error["message"]) == (param, message)
    assert http.get("/v1/runs").json()["data"] == []


# large bodies ---------------------------------------------------------------------------------------------------------

MANY = 50_000
MANY_WRONG: list[tuple[Any, str, dict[str, Any]]] = [
    (ChatBody, CHAT, {"messages": [1] * MANY}),
    (ChatBody, CHAT, {"messages": [{"role": "user", "content": [1] * MANY}]}),
    (ChatBody, CHAT, {"messages": [{"role": "assistant", "tool_calls": [1] * MANY}]}),
    (ChatBody, CHAT, {"messages": HI, "tools": [1] * MANY}),
    (ChatBody, CHAT, {"messages": HI, "stop": [1] * MANY}),
    (ChatBody, CHAT, {"messages": HI, "documents": [1] * MANY}),
    (CompletionBody, TEXT, {"prompt": [None] * MANY}),
    (CompletionBody, TEXT, {"prompt": [[None] * MANY]}),
    (MessagesBody, MESSAGES, {"messages": [1] * MANY}),
    (MessagesBody, MESSAGES, {"messages": HI, "system": [1] * MANY}),
    (MessagesBody, MESSAGES, {"messages": HI, "tools": [{}] * MANY}),
    (MessagesBody, MESSAGES, {"messages": HI, "stop_sequences": [1] * MANY}),
    (ResponsesBody, RESPONSES, {"input": [1] * MANY}),
    (ResponsesBody, RESPONSES, {"input": "x", "tools": [1] * MANY}),
    (RunBody, RUNS, {"inputs": {str(at): at for at in range(MANY)}}),
    (RunBody, RUNS, {"inputs": {}, "reuse": {str(at): at for at in range(MANY)}}),
]


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
