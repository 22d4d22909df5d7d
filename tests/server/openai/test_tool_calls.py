"""Tools: what the model is told of them, what its calls are read as, and the conversation that goes on."""

import json
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.server.openai.tool_calls import PARSERS, AnswerReader, Hermes, can_end
from kedge.settings import ServerSettings
from tests.server.conftest import CALL, MODEL, WEATHER, Talking, talking

TOOL = {"type": "function", "function": WEATHER}
ASK = [{"role": "user", "content": "How is the weather?"}]


# over HTTP ------------------------------------------------------------------------------------------------------------


def answered(told: Talking, text: str, **asked: Any) -> Any:
    """The answer of a model that says this."""
    told.text = text
    return told.served.client().chat.completions.create(**{"model": MODEL, "messages": ASK, "tools": [TOOL], **asked})


def test_a_call_is_read_and_the_conversation_goes_on_with_the_tools_answer(told: Talking) -> None:
    (choice,) = answered(told, f"Let me see.\n{CALL}").choices
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"town": "Åbo"} and call.id.startswith("call_")
    assert json.dumps(TOOL) in told.prompt()
    first = answered(told, CALL).choices[0].message
    assert first.content is None
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": 'rain <|eos|> "8°"'}
    answer = answered(told, "It rains.", messages=[*ASK, first, result])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("It rains.", "stop")
    assert answer.choices[0].message.tool_calls is None
    assert told.prompt().endswith(
        'assistant\n<tool_call>{"name": "weather", "arguments": {"town": "Åbo"}}</tool_call>'
        'tool\nrain <|eos|> "8°"assistant:'
    )
    assert 257 not in told.request().tokens, "no tool ends a turn"
    assert answer.usage.prompt_tokens_details.cached_tokens > len(json.dumps(TOOL))


def test_two_calls_streamed(told: Talking) -> None:
    choices = [chunk.choices[0] for chunk in answered(told, f"So:\n{CALL}\n{CALL}", stream=True, logprobs=True)]
    assert "".join(choice.delta.content or "" for choice in choices) == "So:"
    calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert [(call.index, call.function.name) for call in calls] == [(0, "weather"), (1, "weather")]
    assert len({call.id for call in calls}) == 2
    assert [choice.finish_reason for choice in choices[-2:]] == [None, "tool_calls"]
    said = [entry.token for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert len("".join(said)) >= len(f"So:\n{CALL}\n{CALL}"), "what makes up a call has its chances, too"


def test_one_call_where_it_is_asked_for_or_a_function_is_named(told: Talking) -> None:
    for asked in ({"parallel_tool_calls": False}, {"tool_choice": {"type": "function", "function": WEATHER}}):
        assert len(answered(told, CALL + CALL, **asked).choices[0].message.tool_calls) == 1
        assert "call)*" not in told.request().sampling.grammar
        stream = answered(told, CALL + CALL, **asked, stream=True)
        assert sum(len(chunk.choices[0].delta.tool_calls or ()) for chunk in stream) == 1


def test_without_tools_nobody_is_told_and_nothing_is_read(told: Talking) -> None:
    for asked in ({"tool_choice": "none"}, {"tools": openai.omit}):
        (choice,) = answered(told, CALL, **asked).choices
        assert (choice.message.content, choice.finish_reason) == (CALL, "stop")
        assert "weather" not in told.prompt().replace("the weather", "")


def test_a_server_that_reads_no_calls_takes_no_tools() -> None:
    with talking(settings=ServerSettings()) as told:
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser") as caught:
            answered(told, CALL)
        assert caught.value.param == "tools"
        answered(told, CALL, tool_choice="none")
        answered(told, CALL, tools=[])


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_template_that_keeps_tools_to_itself(is_streamed: bool) -> None:
    with talking(template="{% for m in messages %}{{ m.content }}|{% endfor %}") as told:
        told.text, http = CALL, told.served.http()
        asked = {"model": MODEL, "messages": ASK, "tools": [TOOL], "max_tokens": 200, "stream": is_streamed}
        text = http.post("/v1/chat/completions", json=asked).text
        assert '"ignored":["tools"]' in text and '"name":"weather"' in text
        call = {"function": {"name": "x", "arguments": '{"town": "Åbo"}'}}
        turn = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "rain"}]
        asked = {**asked, "messages": ASK + 20 * turn}
        assert '"ignored":["tools"]' in http.post("/v1/chat/completions", json=asked).text
        assert told.prompt().count('"arguments": {"town": "Åbo"}') == told.prompt().count("|rain|") == 20


# the formats ----------------------------------------------------------------------------------------------------------


def read(parser: AnswerReader, *pieces: str) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls of an answer that comes in `pieces`."""
    said = [parser.read(piece) for piece in pieces] + [parser.read("", last=True)]
    calls = [(call.name, json.loads(call.arguments)) for one in said for call in one.calls]
    return "".join(one.content for one in said), calls


A, B = '{"name": "a", "arguments": {"x": [1, "</"]}}', '{"name": "b"}'
C, D = '{"name": "c", "parameters": {"x": {"y": 1}}}', '{"name": "d"}'
MARKED = r'{"name": "m", "arguments": {"x": "a</tool_call>\"b"}}'
IS_MARKED = ("m", {"x": 'a</tool_call>"b'})

HERMES: list[tuple[str, str, list[Any]]] = [
    (f"<tool_call>{A}</tool_call>", "", [("a", {"x": [1, "</"]})]),
    (f"one \n<tool_call>\n{A}\n</tool_call>\n two ", "one\n two ", [("a", {"x": [1, "</"]})]),
    (f"<tool_call>{B}</tool_call>\n\n<tool_call>{B}</tool_call>\n", "", [("b", {}), ("b", {})]),
    (f"<tool_call>{B}", "", [("b", {})]),
    ("<tool_call>no</tool_call> so", "<tool_call>no</tool_call> so", []),
    ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ('<tool_call>{"name": "x", "arguments": "y"}', '<tool_call>{"name": "x", "arguments": "y"}', []),
    (f"<tool_call>{MARKED}</tool_call>", "", [IS_MARKED]),
    (f"<tool_call>{MARKED}</tool_call> <tool_call>{B}</tool_call>", "", [IS_MARKED, ("b", {})]),
    (f'<tool_call>don"t</tool_call> <tool_call>{B}</tool_call>', '<tool_call>don"t</tool_call>', [("b", {})]),
    (f"<tool_call>{'[' * 3000}</tool_call>", f"<tool_call>{'[' * 3000}</tool_call>", []),
]
LLAMA_3: list[tuple[str, str, list[Any]]] = [
    (C, "", [("c", {"x": {"y": 1}})]),
    (f" \n{C}; {D}", "", [("c", {"x": {"y": 1}}), ("d", {})]),
    (f"{D}\n{D}\n", "", [("d", {}), ("d", {})]),
    (f"{C} and more", f"{C} and more", []),
    (f"So: {C}", f"So: {C}", []),
    ('{"answer": 42}', '{"answer": 42}', []),
    ('{"name": "c", "parameters": [1]}', '{"name": "c", "parameters": [1]}', []),
]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [*(("hermes", *one) for one in HERMES), *(("llama3_json", *one) for one in LLAMA_3)],
)
def test_calls_are_read(name: str, text: str, content: str, calls: list[Any]) -> None:
    assert read(PARSERS[name](), text) == (content, calls)


PIECES = st.lists(
    st.sampled_from(["<tool_call>", "</tool_call>", '"', MARKED, A,
                     B, C, D, "<", "<tool_", "call>", " ", "\n", "x", "{", "}", ";"]),
    max_size=9,
).map("".join)  # fmt: skip


@pytest.mark.parametrize("name", PARSERS)
@given(text=PIECES, cuts=st.lists(st.integers(0, 200), max_size=6))
def test_it_does_not_matter_where_the_pieces_are_cut(name: str, text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    whole = PARSERS[name]().read(text, last=True)
    calls = [(call.name, json.loads(call.arguments)) for call in whole.calls]
    assert read(PARSERS[name](), *pieces) == read(PARSERS[name](), text) == (whole.content, calls)


@given(text=st.text("ab <>{}/\n", max_size=30))
@pytest.mark.parametrize("name", PARSERS)
def test_a_text_without_calls_stays_as_it_is(name: str, text: str) -> None:
    assert read(PARSERS[name](), *text) == (text, [])


@pytest.mark.parametrize("size", range(len(CALL)))
@pytest.mark.parametrize("name", PARSERS)
def test_what_was_cut_off_within_a_call_is_no_text(name: str, size: int) -> None:
    text = {"hermes": f"So: {CALL}", "llama3_json": C}[name][: size + 4]
    said = PARSERS[name]().read(text, last=True, cut=True)
    assert "name" not in said.content or said.calls == ()
    assert name == "llama3_json" or said.content.partition("<")[0].strip() in ("So:", "So")


def test_text_is_not_held_back_longer_than_it_must_be() -> None:
    said = [one.content for one in map(Hermes().read, ("so ", "it", " is<", "b", " <tool_ca"))]
    assert said == ["so", " it", " is", "<b", ""]


# schemas that require themselves --------------------------------------------------------------------------------------

SELF = {"$ref": "#"}
NODE = {"$ref": "#/$defs/node"}


def having(part: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": part}, "required": ["a"], **more}


def nodes(node: Any) -> dict[str, Any]:
    return having(NODE, **{"$defs": {"node": node}})


@pytest.mark.parametrize(
    "schema",
    [
        having(SELF),
        SELF,
        {"anyOf": [SELF]},
        {"allOf": [{"type": "object"}, having(SELF)]},
        nodes(having(NODE)),
        nodes({"type": "array", "items": NODE, "minItems": 1}),
        nodes({"type": "array", "prefixItems": [NODE], "minItems": 1}),
        nodes({"oneOf": [NODE, having(NODE)]}),
        nodes({"anyOf": [NODE] * 30_000}),
        nodes(having(NODE, type=["object", "array"], items=NODE, minItems=1)),
        {"type": "object", "additionalProperties": SELF, "required": ["a"]},
        {"type": "object", "properties": {"~/": {"$ref": "#/properties/~0~1"}}, "required": ["~/"]},
        having({"$ref": "#/%24defs/node"}, **{"$defs": {"node": having(NODE)}}),
    ],
)
def test_a_schema_that_requires_itself_has_no_end(schema: dict[str, Any]) -> None:
    assert not can_end(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        having({"anyOf": [SELF, {"type": "null"}]}),
        nodes(having(NODE, type=["object", "null"])),
        nodes({"type": "array", "items": NODE}),
        {"type": "object", "properties": {"a": SELF}},
        having({"const": SELF}),
        having({"$ref": "#/nowhere"}),
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"allOf": 5, "required": [5], "type": [1], "properties": [], "minItems": "x", "items": 1},
        nodes({"anyOf": [dict(NODE) for _ in range(30_000)]}),
        {**having(NODE), "required": ["a", "b"], "$defs": {"node": having({"anyOf": [SELF, {"type": "null"}]})}},
        {"$defs": {"a": having(NODE)}},
        {"allOf": [dict(NODE) for _ in range(9_000)], "$defs": {"node": {"$ref": "#/" + "a/" * 100_000}}},
    ],
)
def test_a_schema_that_may_end_is_not_refused(schema: dict[str, Any]) -> None:
    assert can_end(schema)
