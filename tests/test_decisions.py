"""The first decision of an answer, and that it agrees with the server's parsers of tool calls."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.decisions import MAX_PICK, PROSE, first_decision, normalized, pick_of
from kedge.server.openai.tool_calls import PARSERS

NAMES = st.text("abcXYZ_-.09", min_size=1, max_size=12)
VALUES = st.recursive(st.one_of(st.integers(), st.text(max_size=8)), lambda inner: st.lists(inner, max_size=2))
READINGS = ("", "<number>", "<letter>", "<word>", "<braced>")
FORMATS = {"llama3_json": ("parameters", "{}"), "hermes": ("arguments", "<tool_call>{}</tool_call>")}


@pytest.mark.parametrize("name", PARSERS)
@given(st.data())
def test_what_the_server_parses_as_a_call_is_one(name: str, data: st.DataObject) -> None:
    key, frame = FORMATS[name]
    function, arguments = data.draw(NAMES), data.draw(st.dictionaries(st.text(max_size=4), VALUES, max_size=2))
    separators = data.draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    answer = frame.format(json.dumps({"name": function, key: arguments}, separators=separators))
    (call,) = PARSERS[name]().read(answer, last=True).calls  # type: ignore[index]
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


@pytest.mark.parametrize(
    ("pick", "answer", "picked"),
    [
        ("answer is <number>", "The answer is **$1,200.50**, as 7 fits.", "1200.5"),
        ("answer is <number>", "The answer is 1. No: the answer is -08.", "-8"),
        ("answer is <number>", "The answer is unknown.", None),
        ("answer is <letter>", "The answer is **(B)** since A fails", "b"),
        ("answer is <letter>", "The answer is Bern", None),
        ("answer is <word>", "The answer is: 'Rome'. It rains.", "rome"),
        (r"\boxed<braced>", r"So \boxed{1}, or \boxed{\frac{1}{2}} of it", r"\frac{1}{2}"),
        (r"\boxed<braced>", r"So \boxed{\frac{1}{2", None),
        (r"\boxed<braced>", r"So \boxed5}", None),
        (r"\boxed<braced>", r"So \boxed{ }", None),
        ("<number>", "I count 3 of 4", "3"),
        ("<letter>", "(c) fits", "c"),
        ("<word>", "", None),
        ("<answer>", "<answer>B</answer>", "b</answer"),
        ("choose <Number>", "I choose <Number> 5", "5"),
    ],
)
def test_a_pick_may_say_how_it_is_read(pick: str, answer: str, picked: str | None) -> None:
    assert pick_of(answer, pick) == picked


@given(st.text("a1 .<>{}-,\n\\", max_size=40), st.text("a1 <>", max_size=6), st.sampled_from(READINGS))
def test_a_pick_is_found_in_the_text_alone(answer: str, mark: str, reading: str) -> None:
    found = pick_of(answer, mark + reading) if mark + reading else None
    assert found is None or (found and len(found) <= MAX_PICK)
    assert found is None or mark.rstrip() in answer or not reading


@pytest.mark.parametrize("reading", READINGS)
def test_a_pick_is_bounded_however_it_is_read(reading: str) -> None:
    for filling in ("1", "a", "{", "1,", "a ", "{}"):
        assert len(pick_of("=" + filling * 10**5, f"={reading}") or "") <= MAX_PICK


@given(st.integers(-(10**12), 10**12), st.integers(0, 4))
def test_every_spelling_of_a_number_is_one(value: int, zeros: int) -> None:
    fraction = "." + "0" * zeros if zeros else ""
    assert normalized(f"{value:,}{fraction}") == normalized(str(value)) == str(value)
