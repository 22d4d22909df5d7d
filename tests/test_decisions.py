"""The first decision of an answer, and that it agrees with the server's parsers of tool calls."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.decisions import MAX_PICK, PROSE, first_decision, pick_of
from kedge.server.openai.tool_calls import PARSERS

NAMES = st.text("abcXYZ_-.09", min_size=1, max_size=12)
VALUES = st.recursive(st.one_of(st.integers(), st.text(max_size=8)), lambda inner: st.lists(inner, max_size=2))
FORMATS = {"llama3_json": ("parameters", "{}"), "hermes": ("arguments", "<tool_call>{}</tool_call>")}


@pytest.mark.parametrize("name", PARSERS)
@given(st.data())
def test_what_the_server_parses_as_a_call_is_one(name: str, data: st.DataObject) -> None:
    key, frame = FORMATS[name]
    function, arguments = data.draw(NAMES), data.draw(st.dictionaries(st.text(max_size=4), VALUES, max_size=2))
    separators = data.draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    answer = frame.format(json.dumps({"name": function, key: arguments}, separators=separators))
    (call,) = PARSERS[name]().push(answer, last=True).calls  # type: ignore[index]
    assert first_decision(answer) == call.name == function


@pytest.mark.parametrize(
    ("answer", "decision"),
    [
        ('{"name": "sell", "para', "sell"),
        ('\n <tool_call>\n{"name": "sell"', "sell"),
        ('{"name":"sell","parameters":{}}; {"name":"keep","parameters":{}}', "sell"),
        ('I call {"name": "sell", "parameters": {}}', PROSE),
        ('{"name": 3}', PROSE),
        ('{"name": "sel', PROSE),
        ("<tool_call>sell</tool_call>", PROSE),
        ("", PROSE),
    ],
)
def test_only_the_beginning_counts(answer: str, decision: str) -> None:
    assert first_decision(answer) == decision


@pytest.mark.parametrize(
    ("answer", "pick"),
    [
        ("I compared both. The answer is B.", "b"),
        ("The answer is A. No: The answer is **B**\nbecause", "b"),
        ("The answer is\n\n 1,200.50 ", "1,200.50"),
        ("The answer is", None),
        ("The answer is ...", None),
        ("the answer is B", None),
        ("", None),
    ],
)
def test_a_pick_is_the_rest_of_the_line_behind_the_last_mark(answer: str, pick: str | None) -> None:
    assert pick_of(answer, "The answer is") == pick


def test_a_pick_is_bounded() -> None:
    assert pick_of("=" + "x" * 10**6, "=") == "x" * MAX_PICK
