"""Parsing of placeholders and compilation to segments, on a tokenizer whose token ids are characters."""

from dataclasses import dataclass

import pytest
from hypothesis import example, given
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
    """Encodes characters."""

    def encode(self, text: str, *, inside: bool = False) -> tuple[int, ...]:  # noqa: ARG002
        return tuple(map(ord, text))

    def chat(self, system: str | None, user: str) -> str:
        return f"[{user}]" if system is None else f"[{system}|{user}]"


def text(tokens: tuple[int, ...]) -> str:
    return "".join(map(chr, tokens))


def values(**by_name: str) -> dict[Placeholder, Value]:
    tokens = {Placeholder.parse(name): tuple(map(ord, value)) for name, value in by_name.items()}
    return {placeholder: Value(ids, SampleId.parse(f"{placeholder.name}@0")) for placeholder, ids in tokens.items()}


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


LONG = pytest.param("agent_a_history_" + "1" * 5000, id="long")


@pytest.mark.parametrize(
    "name", ["", " ", "user question", "x:>3", "x!r", "agent_a_history_0", "agent_a_history_01", LONG]
)
def test_malformed_names_are_named(name: str) -> None:
    with pytest.raises(WorkflowError) as caught:
        parse(f"before {{{name}}} after")
    assert caught.value.value == name


@pytest.mark.parametrize("template", ["open {", "close }", "{a", "a}", "{a{b}}", "{{a}", "{a}}", "{{{a}}"])
def test_single_braces_are_refused(template: str) -> None:
    with pytest.raises(WorkflowError, match="single"):
        parse(template)


Parts = list[str | Placeholder]
PARTS = st.lists(st.one_of(st.text(), st.sampled_from([QUESTION, Placeholder(ValueKind.AGENT, "b", 3)])))


def written(parts: Parts) -> str:
    return "".join(escape(part) if isinstance(part, str) else f"{{{part.name}}}" for part in parts)


@given(PARTS)
def test_parse_inverts_writing(parts: Parts) -> None:
    read = parse(written(parts))
    assert all(part != "" for part in read)
    assert not any(isinstance(a, str) and isinstance(b, str) for a, b in zip(read, read[1:], strict=False))
    flat = [piece for part in parts for piece in (part if isinstance(part, str) else [part])]
    assert [piece for part in read for piece in (part if isinstance(part, str) else [part])] == flat


@given(PARTS, PARTS)
@example(["<0:1> \ue000 \x00 😀 %s \\1"], [QUESTION, QUESTION, " \n ", QUESTION])
def test_segments_are_the_chat_with_values_in_it(system: Parts, user: Parts) -> None:
    agent = compile_agents([Prompt("a", written(system), written(user))], Characters())["a"]
    segments = agent.fill(values(**{one.name: one.name.upper() for one in agent.placeholders}))
    said = ["".join(part if isinstance(part, str) else part.name.upper() for part in parts) for parts in (system, user)]
    assert "".join(text(one.tokens) for one in segments) == Characters().chat(said[0] or None, said[1])
    names = iter(part.name for part in (*system, *user) if isinstance(part, Placeholder))
    behind = 0
    for one in segments:
        assert one.tokens and one.name == (next(names) if one.is_placeholder else f"p{behind}")
        behind += one.is_placeholder
    assert next(names, None) is None


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


def test_a_missing_value_is_named_and_its_stand_in_is_the_name_in_braces() -> None:
    agent = compile_agents([Prompt("a", "", "{agent_b_current}")], Characters())["a"]
    assert [text(tokens) for tokens in agent.stand_ins] == ["{agent_b_current}"]
    with pytest.raises(UnknownPlaceholder, match="agent a='agent_b_current'"):
        agent.fill({})


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
