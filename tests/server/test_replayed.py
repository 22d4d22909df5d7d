"""Histories that clients replay: whatever a session once had in it, its next turn is answered, in every protocol."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.talking import CALL, MODEL, Talking

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
ASK: Any = {"role": "user", "content": "How is it?"}
FUNCTION: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def http(told: Talking) -> Iterator[httpx.Client]:
    with told.served.http() as opened:
        yield opened


def said(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    """The answer to a call that must be answered."""
    answer = http.post(path, json={"model": MODEL, **({"max_tokens": 50} if path == MESSAGES else {}), **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


# parts that are no text -----------------------------------------------------------------------------------------------

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
URL = {"type": "document", "source": {"type": "url", "url": "x"}}
SEE = {"type": "text", "text": "see"}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
SEARCH = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def assistant(*parts: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(parts)}


RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [SEE, IMAGE]}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]}
UNREAD: list[tuple[str, str, dict[str, Any]]] = [
    (MESSAGES, "image", {"messages": [user(SEE, IMAGE)]}),
    (MESSAGES, "image", {"messages": [ASK, assistant(USE), user(RESULT)]}),
    (MESSAGES, "document", {"messages": [user(URL)]}),
    (MESSAGES, "server_tool_use", {"messages": [ASK, assistant(SEARCH), ASK]}),
    (MESSAGES, "image", {"system": [IMAGE], "messages": [ASK]}),
    (CHAT, "image_url", {"messages": [user({"type": "image_url", "image_url": {"url": "data:"}})]}),
    (CHAT, "input_audio", {"messages": [ASK, assistant({"type": "input_audio", "input_audio": {}}), ASK]}),
    (CHAT, "file", {"messages": [{"role": "tool", "tool_call_id": "t", "content": [{"type": "file", "file": {}}]}]}),
    (RESPONSES, "input_image", {"input": [user({"type": "input_image", "image_url": "data:"})]}),
    (RESPONSES, "input_file", {"input": [OUTPUT, ASK]}),
]


@pytest.mark.parametrize(("path", "kind", "body"), UNREAD)
def test_the_model_reads_that_there_was_what_it_cannot_read(
    told: Talking, http: httpx.Client, path: str, kind: str, body: dict[str, Any]
) -> None:
    answer = said(http, path, **body)
    assert f"[{kind}: this model reads text only]" in told.prompt()
    assert answer["kedge"]["ignored"] == [f"messages.{kind}"]


def test_texts_of_other_kinds_are_read(told: Talking, http: httpx.Client) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "A whole book."}
    content = [{"type": "document", "source": source}, {"type": "thinking", "thinking": "Hm."}]
    answer = said(http, MESSAGES, messages=[{"role": "user", "content": content}])
    assert "A whole book." in told.prompt() and "Hm." not in told.prompt() and "ignored" not in answer["kedge"]
    said(http, CHAT, messages=[ASK, {"role": "assistant", "content": [{"type": "refusal", "refusal": "I won't."}]}])
    assert "I won't." in told.prompt()


# tools that a server does not run ------------------------------------------------------------------------------------

PATCH = {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": {"type": "grammar"}}
SPACE = {
    "type": "namespace",
    "name": "mcp__docs",
    "description": "Docs.",
    "tools": [{"type": "function", "name": "find", "parameters": {"type": "object"}}, {"type": "search"}],
}
FIND = {"type": "function", "name": "find", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("path", "tools", "ignored"),
    [
        (RESPONSES, [{"type": "web_search"}, {"type": "computer"}], ["tools.web_search", "tools.computer"]),
        (RESPONSES, [{"type": "web_search"}, PATCH, SPACE], ["tools.web_search", "tools.search"]),
        (RESPONSES, [{"type": "local_shell"}, {}], ["tools.local_shell", "tools.None"]),
        (MESSAGES, [{"type": "web_search_20250305", "name": "web_search"}], ["tools.web_search_20250305"]),
        (MESSAGES, [{"type": "bash_20250124", "name": "bash"}, {"name": "f"}], ["tools.bash_20250124"]),
        (CHAT, [{"type": "custom", "custom": {"name": "x"}}, FUNCTION], ["tools.custom"]),
    ],
)
def test_tools_that_nobody_runs_are_left_out(
    http: httpx.Client, path: str, tools: list[Any], ignored: list[str]
) -> None:
    asked = {"input": "How is it?"} if path == RESPONSES else {"messages": [ASK]}
    assert said(http, path, **asked, tools=tools)["kedge"]["ignored"] == ignored


def test_items_that_nobody_reads_are_left_out(told: Talking, http: httpx.Client) -> None:
    items = [ASK, {"type": "web_search_call", "id": "w"}, {"type": "item_reference", "id": "i"}, {"type": "compaction"}]
    answer = said(http, RESPONSES, input=[*items, {**ASK, "content": "And now?"}])
    assert answer["kedge"]["ignored"] == ["input.web_search_call", "input.item_reference", "input.compaction"]
    assert "How is it?" in told.prompt() and "And now?" in told.prompt()


@pytest.mark.parametrize("choice", [{"type": "web_search"}, {"type": "allowed_tools", "mode": "auto", "tools": []}])
def test_a_choice_that_nobody_follows_is_left_out(http: httpx.Client, choice: Any) -> None:
    answer = said(http, RESPONSES, input="x", tools=[FIND], tool_choice=choice)
    assert answer["kedge"]["ignored"] == ["tool_choice"]


def test_a_function_in_a_namespace_keeps_its_namespace(told: Talking) -> None:
    client = told.served.client()
    for name, tools in (("find", [SPACE]), ("mcp__docs__find", [FIND, SPACE])):
        told.text = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
        (call,) = client.responses.create(model=MODEL, input="Find.", tools=tools).output
        assert (call.name, call.model_dump()["namespace"]) == ("find", "mcp__docs")
        told.text = "Done."
        items: Any = [ASK, call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": ""}]
        client.responses.create(model=MODEL, input=items, tools=tools)
        assert f'"name": "{name}"' in told.prompt()


# Anthropic's own ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", ["It is", [{"type": "text", "text": "It is "}], [{"type": "text", "text": "It\nis"}]]
)
def test_an_answer_that_is_begun_is_continued(told: Talking, content: Any) -> None:
    told.text = " fine."
    told.claude().messages.create(model=MODEL, max_tokens=9, messages=[ASK, {"role": "assistant", "content": content}])
    begun = content if isinstance(content, str) else content[0]["text"]
    assert told.prompt().endswith(f"assistant\n{begun.rstrip()}")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "stops", "reason", "stopped"),
    [
        ("One. Two. END.", ["END"], "stop_sequence", "END"),
        ("One\n\nTwo", ["x", "\n\n"], "stop_sequence", "\n\n"),
        ("One", ["END"], "end_turn", None),
        ("One two three four five six seven eight nine ten eleven", ["END"], "max_tokens", None),
        (CALL, ["END"], "tool_use", None),
    ],
)
def test_the_stop_sequence_is_named(
    told: Talking, text: str, stops: list[str], reason: str, stopped: str | None, stream: bool
) -> None:
    told.text = text
    asked: Any = {"model": MODEL, "max_tokens": 80 if reason == "tool_use" else 40, "messages": [ASK]}
    asked |= {"stop_sequences": stops, "tools": [{"name": "weather", "input_schema": {"type": "object"}}]}
    if stream:
        with told.claude().messages.stream(**asked) as events:
            answer = events.get_final_message()
    else:
        answer = told.claude().messages.create(**asked)
    assert (answer.stop_reason, answer.stop_sequence) == (reason, stopped)


def test_both_events_of_a_stream_count_the_same_input(told: Talking) -> None:
    told.text = "Fine."
    for _ in range(2):  # the second from the cache
        with told.claude().messages.stream(model=MODEL, max_tokens=9, messages=[ASK]) as stream:
            counts = [one.message.usage if one.type == "message_start" else one.usage
                      for one in stream if one.type in ("message_start", "message_delta")]  # fmt: skip
        assert counts[0].input_tokens == counts[1].input_tokens > 0
        assert not counts[1].cache_read_input_tokens


@pytest.mark.parametrize("tokens", [9000, 40_000])
@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
def test_an_overflow_is_told_as_clients_look_for_it(http: httpx.Client, tokens: int, path: str) -> None:
    body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "x" * tokens}]}
    answer = http.post(path, json=body)
    if path == MESSAGES:
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["message"] == f"prompt is too long: {tokens + 17} tokens > 8192 maximum"
    else:
        assert answer.json()["input_tokens"] == tokens + 17


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        (MESSAGES, {"model": "other", "messages": [ASK], "max_tokens": 5}, 404, "not_found_error"),
        (MESSAGES, {"model": MODEL, "messages": [{**ASK, "content": "x" * (5 << 20)}]}, 413, "request_too_large"),
        (f"{MESSAGES}/count_tokens", {"model": "other", "messages": [ASK]}, 404, "not_found_error"),
        (MESSAGES, {"model": MODEL, "messages": []}, 400, "invalid_request_error"),
    ],
)
def test_errors_have_anthropics_types(http: httpx.Client, path: str, body: Any, status: int, kind: str) -> None:
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.json()["type"], answer.json()["error"]["type"]) == (status, "error", kind)


# calls and results in older words ------------------------------------------------------------------------------------

RESULT_OF_A = {"role": "tool", "tool_call_id": "a", "content": "x"}


def called(**call: Any) -> list[dict[str, Any]]:
    return [ASK, {"role": "assistant", "content": None, "tool_calls": [{"id": "a", **call}]}, RESULT_OF_A]


@pytest.mark.parametrize("messages", [
    called(type="custom", custom={"name": "f", "input": "x"}),
    called(type="function", function={"name": "f", "arguments": [1]}),
    called(type="function", function={"name": "f", "arguments": 5}),
    called(type="function", function={"name": "f", "arguments": True}),
    [ASK, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
     {"role": "function", "name": "f", "content": "x"}],
])  # fmt: skip
def test_calls_in_whatever_form_are_part_of_a_chat(http: httpx.Client, messages: list[Any]) -> None:
    said(http, CHAT, messages=[*messages, ASK])


@pytest.mark.parametrize("given", [[1], "[1]", 5, None, "cut: {"])
def test_a_call_with_any_input_is_part_of_a_message(http: httpx.Client, given: Any) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
    said(http, MESSAGES, messages=[ASK, assistant({**USE, "input": given}), user(result)])


def test_a_result_that_is_an_object_is_read_as_its_json(told: Talking, http: httpx.Client) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": {"content": "it rains", "success": True}}
    said(http, RESPONSES, input=[ASK, call, result])
    assert '"content": "it rains"' in told.prompt()
