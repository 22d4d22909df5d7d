"""The protocols that a server speaks: histories that clients replay, answers in their words, and what they may ask for.

Whatever a session once had in it, its next turn is answered. Parameters of other servers are followed, refused by
name, or named in the answer as ignored.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest

from kedge.engine.echo import EchoEngine
from kedge.server.anthropic import MessagesBody
from kedge.server.openai.protocol import UNSUPPORTED, ChatBody, CompletionBody
from kedge.server.openai.tool_calls import Hermes, read_json
from kedge.server.responses import ResponsesBody
from kedge.types import SamplingParams
from tests.server.conftest import CALL, MODEL, WEATHER, Served, Talking, serving

ASK: Any = {"role": "user", "content": "How is it?"}
HI = {"messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": HI,
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {**HI, "max_tokens": 5},
    "/v1/responses": {"input": "hi"},
}
CHAT, TEXT, MESSAGES, RESPONSES = BODIES
TOOL: Any = {"type": "function", **WEATHER}


@pytest.fixture(scope="module")
def served(told: Talking) -> Served:
    return told.served


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
    (MESSAGES, "image", {"messages": [ASK, assistant(USE), user(RESULT)]}),
    (MESSAGES, "document", {"messages": [user(URL)]}),
    (MESSAGES, "server_tool_use", {"messages": [ASK, assistant(SEARCH), ASK]}),
    (MESSAGES, "image", {"system": [IMAGE], "messages": [ASK]}),
    (CHAT, "input_audio", {"messages": [ASK, assistant({"type": "input_audio", "input_audio": {}}), ASK]}),
    (CHAT, "file", {"messages": [{"role": "tool", "tool_call_id": "t", "content": [{"type": "file", "file": {}}]}]}),
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
    documents = [{"type": "document", "source": one} for one in (source, {"type": "content", "content": [SEE, SEE]})]
    found = {"type": "search_result", "source": "/a", "title": "A", "content": [{"type": "text", "text": "Found."}]}
    answer = said(http, MESSAGES, messages=[user(*documents, found, {"type": "thinking", "thinking": "Hm."})])
    assert "A whole book.see\nseeFound." in told.prompt() and "Hm." not in told.prompt()
    assert "ignored" not in answer["kedge"]
    refused = {"content": [{"type": "refusal", "refusal": "I won't."}]}, {"content": None, "refusal": "Never."}
    said(http, CHAT, messages=[ASK, *({"role": "assistant", **one} for one in refused)])
    assert "I won't." in told.prompt() and "Never." in told.prompt()


# tools that a server does not run ------------------------------------------------------------------------------------

PATCH = {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": {"type": "grammar"}}
FIND = {"type": "function", "name": "find", "parameters": {"type": "object"}}
SPACE = {"type": "namespace", "name": "mcp__docs", "description": "Docs.", "tools": [FIND, {"type": "search"}]}


@pytest.mark.parametrize(
    ("path", "tools", "ignored"),
    [
        (RESPONSES, [{"type": "web_search"}, {"type": "computer"}], ["tools.web_search", "tools.computer"]),
        (RESPONSES, [{"type": "web_search"}, PATCH, SPACE], ["tools.web_search", "tools.search"]),
        (RESPONSES, [{"type": "local_shell"}, {}], ["tools.local_shell", "tools.None"]),
        (MESSAGES, [{"type": "web_search_20250305", "name": "web_search"}], ["tools.web_search_20250305"]),
        (MESSAGES, [{"type": "bash_20250124", "name": "bash"}, {"name": "f"}], ["tools.bash_20250124"]),
        (CHAT, [{"type": "custom", "custom": {"name": "x"}}], ["tools.custom"]),
    ],
)
def test_tools_that_nobody_runs_are_left_out(
    http: httpx.Client, path: str, tools: list[Any], ignored: list[str]
) -> None:
    answer = http.post(path, json={**BODIES[path], "tools": tools})
    assert answer.status_code == 200 and answer.json()["kedge"]["ignored"] == ignored, answer.text


@pytest.mark.parametrize("choice", [{"type": "web_search"}, {"type": "allowed_tools", "mode": "auto", "tools": []}])
def test_items_that_nobody_reads_and_choices_that_nobody_follows_are_left_out(
    told: Talking, http: httpx.Client, choice: Any
) -> None:
    items = [ASK, {"type": "web_search_call", "id": "w"}, {"type": "item_reference", "id": "i"}, {"type": "compaction"}]
    answer = said(http, RESPONSES, input=[*items, {**ASK, "content": "And now?"}], tools=[FIND], tool_choice=choice)
    unread = ["input.web_search_call", "input.item_reference", "input.compaction"]
    assert sorted(answer["kedge"]["ignored"]) == sorted([*unread, "tool_choice"])
    assert "How is it?" in told.prompt() and "And now?" in told.prompt()


def test_a_function_in_a_namespace_keeps_its_namespace(told: Talking, client: openai.OpenAI) -> None:
    for name, tools in (("find", [SPACE]), ("mcp__docs__find", [FIND, SPACE])):
        told.text = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
        (call,) = client.responses.create(model=MODEL, input="Find.", tools=tools).output
        assert (call.name, call.model_dump()["namespace"]) == ("find", "mcp__docs")
        told.text = "Done."
        items: Any = [ASK, call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": ""}]
        client.responses.create(model=MODEL, input=items, tools=tools)
        assert f'"name": "{name}"' in told.prompt()


def tools(kinds: Sequence[str | None]) -> list[dict[str, Any]]:
    return [{"type": kind, "name": f"f{at}"} for at, kind in enumerate(kinds)]


@pytest.mark.parametrize(
    "read",
    [
        lambda n: ResponsesBody(input="?", tools=[{**SPACE, "tools": tools(["function"] * n)}]).chat(),
        lambda n: ResponsesBody(
            input=[{"type": "function_call", "call_id": "c", "name": "x"}] * n, tools=tools(["function"] * n)
        ).chat(),
        lambda n: MessagesBody(**HI, tools=tools(["x", None] * n)).chat(),
        lambda n: [*map(Hermes().read, ['<tool_call>"', *["</tool_call>"] * n])],
        lambda n: Hermes().read('<tool_call>"</tool_call>"' * n, last=True),
    ],
)
def test_what_reading_costs_grows_with_what_is_read(read: Callable[[int], object]) -> None:
    def steps(many: int) -> int:
        """How many lines are run."""
        lines, before = 0, sys.gettrace()

        def count(*_: object) -> Any:
            nonlocal lines
            lines += 1
            return count

        sys.settrace(count)
        try:
            read(many)
        finally:
            sys.settrace(before)
        return lines

    _, few, more, most = map(steps, (10, 10, 310, 610))  # the first time, modules are imported
    assert most - more < 1.2 * (more - few)


# Anthropic's own ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["It is", [{"type": "text", "text": "It\nis "}]])
def test_an_answer_that_is_begun_is_continued(told: Talking, content: Any) -> None:
    told.text = " fine."
    messages: Any = [ASK, {"role": "assistant", "content": content}]
    told.served.claude().messages.create(model=MODEL, max_tokens=9, messages=messages)
    begun = content if isinstance(content, str) else content[0]["text"]
    assert told.prompt().endswith(f"assistant\n{begun.rstrip()}")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "stops", "reason", "stopped"),
    [
        ("One. Two. END.", ["END"], "stop_sequence", "END"),
        ("One\n\nTwo", ["x", "\n\n"], "stop_sequence", "\n\n"),
        ("END.", ["END"], "stop_sequence", "END"),
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
        with told.served.claude().messages.stream(**asked) as events:
            answer = events.get_final_message()
    else:
        answer = told.served.claude().messages.create(**asked)
    assert (answer.stop_reason, answer.stop_sequence) == (reason, stopped)
    assert stream or answer.content, "a whole answer has a text, even if it is empty"


def test_both_events_of_a_stream_count_the_same_input(told: Talking) -> None:
    told.text = "Fine."
    for _ in range(2):  # the second from the cache
        with told.served.claude().messages.stream(model=MODEL, max_tokens=9, messages=[ASK]) as stream:
            counts = [one.message.usage if one.type == "message_start" else one.usage
                      for one in stream if one.type in ("message_start", "message_delta")]  # fmt: skip
        assert counts[0].input_tokens == counts[1].input_tokens > 0
        assert not counts[1].cache_read_input_tokens


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        (MESSAGES, {"model": "other", "messages": [ASK], "max_tokens": 5}, 404, "not_found_error"),
        (MESSAGES, {"model": MODEL, "messages": [{**ASK, "content": "x" * (5 << 20)}]}, 413, "request_too_large"),
        (f"{MESSAGES}/count_tokens", {"model": "other", "messages": [ASK]}, 404, "not_found_error"),
    ],
)
def test_errors_have_anthropics_types(http: httpx.Client, path: str, body: Any, status: int, kind: str) -> None:
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.json()["type"], answer.json()["error"]["type"]) == (status, "error", kind)
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


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


def test_a_result_that_is_an_object_is_read_as_its_json(told: Talking, http: httpx.Client) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": {"content": "it rains", "success": True}}
    said(http, RESPONSES, input=[ASK, call, result])
    assert '"content": "it rains"' in told.prompt()


# responses ------------------------------------------------------------------------------------------------------------


def test_an_answer_that_is_cut_off_is_incomplete(told: Talking, client: openai.OpenAI) -> None:
    told.text = "It rains and rains."
    answer = client.responses.create(model=MODEL, input="?", max_output_tokens=4)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output_text == "It r"


def test_a_stream_has_all_events_in_order_and_ends_as_the_whole_answer(told: Talking, client: openai.OpenAI) -> None:
    told.text = f"I look.\n{CALL}\nThere it is.\n{CALL}"
    with client.responses.stream(model=MODEL, input="Weather?", tools=[TOOL]) as stream:
        events = list(stream)
        answer = stream.get_final_response()
    assert [one.sequence_number for one in events if hasattr(one, "sequence_number")] == list(range(len(events)))
    kinds = [one.type for one in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    begun, done = (
        [one.item for one in events if one.type == f"response.output_item.{end}"] for end in ("added", "done")
    )
    assert [one.id for one in begun] == [one.id for one in done] == [one.id for one in answer.output]
    assert [one.type for one in answer.output] == ["message", "function_call", "message", "function_call"]
    assert [one.content[0].text.strip() for one in done[::2]] == ["I look.", "There it is."]
    text = "".join(one.delta for one in events if one.type == "response.output_text.delta")
    assert text == answer.output_text and answer.usage.output_tokens > 0


def test_a_stream_that_fails_says_so_in_its_last_events_and_its_reader_raises(http: httpx.Client) -> None:
    answer = http.post(RESPONSES, json={"input": "x" * 9000, "stream": True})
    *_, event, last = (read_json(line[6:]) for line in answer.text.splitlines() if line.startswith("data: "))
    error = last["response"]["error"]
    assert (event["type"], last["type"], last["response"]["status"]) == ("error", "response.failed", "failed")
    assert event["code"] == event["error"]["code"] == error["code"] == "context_length_exceeded"
    assert error["message"].endswith("9017 tokens > 8192 maximum, this model's maximum context length is 8192 tokens")
    engine = EchoEngine(delay_s=0.001)
    with engine, serving(engine) as running:
        stream = running.client().responses.create(model=MODEL, input="x" * 4000, stream=True)
        kinds = [next(stream).type for _ in range(5)]
        engine.fail(RuntimeError("boom"))
        with pytest.raises(openai.APIError) as failed:
            list(stream)
    assert (kinds[0], failed.value.code) == ("response.created", "engine_closed")


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("place", ["tools", "metadata", "text"])
def test_a_number_that_json_cannot_write_is_said_again_as_null(told: Talking, place: str, is_streamed: bool) -> None:
    told.text = "Yes."
    fields = {"tools": '[{"type": "x", "n": 1e400}]', "metadata": '{"n": -1e400}', "text": '{"n": [1e400]}'}
    body = f'{{"model": "{MODEL}", "input": "?", "stream": {str(is_streamed).lower()}, "{place}": {fields[place]}}}'
    answer = told.served.http().post("/v1/responses", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200 and '"n":null' in answer.text.replace("[null]", "null")


def test_what_nests_too_deeply_to_be_said_again_is_refused_before_it_is_answered(told: Talking) -> None:
    before, answers, deepest = len(told.served.engine.requests), list[int](), 850
    with suppress(ValueError):  # near 1,000 on Python 3.11, where JSON is read as deep as calls may be, later far above
        while read_json("[" * deepest + "]" * deepest):
            deepest += 4
    for depth in range(deepest - 149, deepest + 1, 4):
        body = f'{{"input": "?", "metadata": {{"x": {"[" * depth}{"]" * depth}}}}}'.ljust(1 << 17)
        answer = told.served.http().post(RESPONSES, content=body, headers={"Content-Type": "application/json"})
        answers.append(answer.status_code)
    assert set(answers) == {200, 400}
    assert len(told.served.engine.requests) - before == answers.count(200)


# parameters -----------------------------------------------------------------------------------------------------------


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
    assert '"ignored":["zeal"]' in http.post(path, json={**BODIES[path], "zeal": 1, "stream": True}).text


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
