"""Parsing of placeholders and compilation to segments, on a tokenizer whose token ids are characters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.errors import UnknownPlaceholder, WorkflowError
from kedge.types import SampleId, Segment, ValueKind
from kedge.workflow.template import Placeholder, Value, compile_agents, escape, parse

QUESTION = Placeholder(ValueKind.INPUT, "user_question")


@dataclass(frozen=True)
class Prompt:
    id: str
    system: str
    user: str


class Characters:
    """Encodes characters; records what it was asked to encode."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, text: str, *, inside: bool = False) -> tuple[int, ...]:  # noqa: ARG002
        self.encoded.append(text)
        return tuple(map(ord, text))

    def chat(self, system: str | None, user: str) -> str:
        return f"[{user}]" if system is None else f"[{system}|{user}]"


def text(tokens: tuple[int, ...]) -> str:
    return "".join(map(chr, tokens))


def texts(many: Iterable[tuple[int, ...]]) -> list[str]:
    return list(map(text, many))


def values(**by_name: str) -> dict[Placeholder, Value]:
    tokens = {Placeholder.parse(name): tuple(map(ord, value)) for name, value in by_name.items()}
    return {placeholder: Value(ids, SampleId.parse(f"{placeholder.name}@0")) for placeholder, ids in tokens.items()}


def compiled(user: str, system: str = "") -> list[tuple[str, str]]:
    """Name and text of the segments, every placeholder filled with its own name in capitals."""
    agent = compile_agents([Prompt("a", system, user)], Characters())["a"]
    segments = agent.fill(values(**{p.name: p.name.upper() for p in agent.placeholders}))
    return [(segment.name, text(segment.tokens)) for segment in segments]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("user_question", (ValueKind.INPUT, "user_question", 0)),
        ("agent_solver_current", (ValueKind.AGENT, "solver", 0)),
        ("condition_solver_current", (ValueKind.CONDITION, "solver", 0)),
        ("agent_solver_history_2", (ValueKind.AGENT, "solver", 2)),
        ("condition_a-b_c_history_12", (ValueKind.CONDITION, "a-b_c", 12)),
        ("agent_a_history_1_current", (ValueKind.AGENT, "a_history_1", 0)),
        ("agent_solver", (ValueKind.INPUT, "agent_solver", 0)),
        ("agent_solver_history_", (ValueKind.INPUT, "agent_solver_history_", 0)),
    ],
)
def test_names(name: str, expected: tuple[ValueKind, str, int]) -> None:
    placeholder = Placeholder.parse(name)
    assert (placeholder.kind, placeholder.of, placeholder.turns_back) == expected
    assert placeholder.name == name


@pytest.mark.parametrize("name", ["", " ", "user question", "x:>3", "x!r", "agent_a_history_0", "agent_a_history_01"])
def test_malformed_names_are_named(name: str) -> None:
    with pytest.raises(WorkflowError) as caught:
        parse(f"before {{{name}}} after")
    assert caught.value.value == name


@pytest.mark.parametrize("template", ["open {", "close }", "{a", "a}", "{a{b}}", "{{a}", "{a}}", "{{{a}}"])
def test_single_braces_are_refused(template: str) -> None:
    with pytest.raises(WorkflowError, match="single"):
        parse(template)


def test_parse_and_escapes() -> None:
    assert parse("a{user_question}b") == ("a", QUESTION, "b")
    assert parse("{user_question}{user_question}") == (QUESTION, QUESTION)
    assert parse("{{user_question}} {{{user_question}}}") == ("{user_question} {", QUESTION, "}")
    assert parse("") == ()


@given(st.lists(st.one_of(st.text(), st.sampled_from([QUESTION, Placeholder(ValueKind.AGENT, "b", 3)]))))
def test_parse_inverts_writing(parts: list[str | Placeholder]) -> None:
    written = "".join(escape(part) if isinstance(part, str) else f"{{{part.name}}}" for part in parts)
    read = parse(written)
    assert all(part != "" for part in read)
    assert not any(isinstance(a, str) and isinstance(b, str) for a, b in zip(read, read[1:], strict=False))
    flat = [piece for part in parts for piece in (part if isinstance(part, str) else [part])]
    assert [piece for part in read for piece in (part if isinstance(part, str) else [part])] == flat


def test_segments_in_order_with_their_names() -> None:
    assert compiled("Q: {user_question}\nA: {agent_b_current}!", "be nice") == [
        ("p0", "[be nice|Q: "),
        ("user_question", "USER_QUESTION"),
        ("p1", "\nA: "),
        ("agent_b_current", "AGENT_B_CURRENT"),
        ("p2", "!]"),
    ]


def test_adjacent_repeated_and_blank_between() -> None:
    names = [name for name, _ in compiled("{a}{b} \n {a}{a}")]
    assert names == ["p0", "a", "b", "p2", "a", "a", "p4"]
    assert dict(compiled("{a}{b} \n {a}"))["p2"] == " \n "


def test_placeholder_in_the_system_message_and_literal_braces() -> None:
    assert compiled("{{x}} {a}", system="You are {b}, {{}}.") == [
        ("p0", "[You are "),
        ("b", "B"),
        ("p1", ", {}.|{x} "),
        ("a", "A"),
        ("p2", "]"),
    ]


def test_missing_value_is_named() -> None:
    agent = compile_agents([Prompt("a", "", "{x}")], Characters())["a"]
    with pytest.raises(UnknownPlaceholder, match="agent a='x'"):
        agent.fill({})


def base_context(segments: tuple[Segment, ...], name: str) -> str:
    return text(next(segment for segment in segments if segment.name == name).base_context)


def test_base_context_is_the_beginning_of_a_prompt_or_the_last_line_before_the_first_use() -> None:
    agents = [
        Prompt("a", "system a", "Intro.\nQuestion: {q}"),
        Prompt("b", "system b", "Other words {q}\n\nSolver:\n\n{agent_a_current}{x}"),
    ]
    both = compile_agents(agents, Characters())
    filled = values(q="?", agent_a_current="!", x="x")
    for agent in both.values():
        assert base_context(agent.fill(filled), "q") == "[system a|Intro.\nQuestion: "
    assert [one.name for one in both["b"].fill(filled) if one.in_context] == ["q"]
    assert base_context(both["b"].fill(filled), "agent_a_current") == "[Solver:\n\n"
    assert base_context(both["b"].fill(filled), "x") == "["


def test_stand_in_is_the_name_in_braces() -> None:
    agent = compile_agents([Prompt("a", "", "{agent_b_current}")], Characters())["a"]
    assert [text(tokens) for tokens in agent.stand_ins] == ["{agent_b_current}"]


def test_a_chat_template_that_drops_the_system_message_is_refused() -> None:
    class Deaf(Characters):
        def chat(self, system: str | None, user: str) -> str:  # noqa: ARG002
            return user

    with pytest.raises(WorkflowError, match="agent a"):
        compile_agents([Prompt("a", "You are {x}", "{y}")], Deaf())


def test_a_chat_template_may_put_the_user_first() -> None:
    class Swapped(Characters):
        def chat(self, system: str | None, user: str) -> str:
            return f"{user}|{system}"

    agent = compile_agents([Prompt("a", "S {x}", "U {y}")], Swapped())["a"]
    assert [placeholder.name for placeholder in agent.placeholders] == ["y", "x"]


def test_text_may_hold_anything_but_lone_braces() -> None:
    odd = "<0:1> \ue000 \x00 😀 %s \\1"
    assert compiled(f"{odd}{{x}}{odd}") == [("p0", f"[{odd}"), ("x", "X"), ("p1", f"{odd}]")]
