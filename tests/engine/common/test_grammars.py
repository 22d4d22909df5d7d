"""Grammars are compiled once, and answers that share one do not share how far they have come."""

import pytest
from tokenizers import AddedToken

from kedge.checks import MAX_GRAMMAR
from kedge.engine.common.grammars import Grammars
from kedge.engine.common.model_folder import model_path
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.errors import InvalidGrammar
from kedge.server.openai.protocol import ChatBody
from kedge.server.openai.tool_calls import Hermes, grammar_of

GRAMMAR = 'start: "abc"'


@pytest.fixture(scope="module")
def known() -> Grammars:
    tokenizer = HFTokenizer.load(model_path(None))
    return Grammars(tokenizer, {tokenizer.inner.eos_token_id}, len(tokenizer.inner))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that were compiled."""
    seen, original = list[str](), Grammars._compile
    monkeypatch.setattr(Grammars, "_compile", lambda self, one: (seen.append(one), original(self, one))[1])
    return seen


def test_answers_that_share_a_grammar_go_on_by_themselves(known: Grammars, compiled: list[str]) -> None:
    one, other = known.begin(GRAMMAR), known.begin(GRAMMAR)
    assert one and other and compiled == [GRAMMAR]
    at_first = other.allowed()
    for token in known._tokenizer.encode("abc", special=False):
        one.take(token)
    assert other.allowed() == at_first != one.allowed()


def test_what_is_not_a_grammar_is_refused_each_time(known: Grammars, compiled: list[str]) -> None:
    for _ in range(2):
        with pytest.raises(InvalidGrammar, match="cannot be read"):
            known.begin("start: nothing")
    assert len(compiled) == 2
    assert known.begin("") is None


def test_a_very_long_grammar_is_not_kept(known: Grammars, compiled: list[str]) -> None:
    long = f"{GRAMMAR}\n// {'x' * MAX_GRAMMAR}"
    assert known.begin(long) and known.begin(long) and compiled == [long, long]


def test_what_is_kept_is_a_tenants_own_and_bounded(known: Grammars, compiled: list[str]) -> None:
    size = MAX_GRAMMAR // 3
    first, *others = (f"{GRAMMAR}\n// {number}{'x' * size}" for number in range(3))
    one, other = "a", "b"
    for grammar in (first, *others):
        known.begin(grammar, one)
    known.begin(others[1], one)
    assert len(compiled) == 3, "the last ones are kept"
    known.begin(first, one)
    assert len(compiled) == 4, "the oldest went"
    known.begin(first, other)
    assert len(compiled) == 5, "the time tells nothing of another tenant's"


@pytest.mark.parametrize(
    "schema",
    [
        '{"const": -9223372036854775808}',
        '{"enum": ["a",-9223372036854775807]}',
        '{"const": [-9223372036854775799]}',
        '{"type": "integer", "minimum": -9223372036854775807, "maximum": -9223372036854775806}',
        '{"type": "integer", "minimum":-1E30, "maximum":-9.3e18}',
        '{"$ref": "#/$defs/a", "$defs": {"a": {"multipleOf" : 9.9991E4}}}',
        '{"properties": {"a": {"multipleOf":65521000.0}}}',
        '{"type": "integer", "multipleOf": 0.99991}',
        '{"allOf": [{"multipleOf": 101}, {"multipleOf": 103.0}]}',
    ],
)
def test_numbers_that_would_end_the_process_are_refused(known: Grammars, schema: str) -> None:
    with pytest.raises(InvalidGrammar, match="`multipleOf`s" if "multipleOf" in schema else "too small"):
        known.begin(f"start: %json {schema}")


def test_other_long_numbers_are_taken(known: Grammars) -> None:
    said = '{"enum": [-9223372036854774000, 9223372036854775807, "at-99999999999999999999999", -1.5e-7]}'
    assert known.begin(f"start: %json {said}")
    fields = ", ".join(f'"{at}": {{"multipleOf": {one}}}' for at, one in enumerate(("0.01", 1e-5, 86400, 12, 10**6)))
    assert known.begin(f'start: %json {{"properties": {{{fields}}}}}')


@pytest.mark.parametrize(
    ("schema", "is_forced"),
    [({"type": "string", "pattern": "^(ab){40}$"}, True), ({"type": "string", "pattern": "^((ab){100}){40}$"}, False),
     ({"const": 200 * "ab"}, True), ({"enum": [4_500 * "ab", "c"]}, False), ({"const": 4_500 * "ab"}, False)],
)  # fmt: skip
def test_what_is_certain_is_read_ahead_only_where_it_is_short(known: Grammars, schema: object, is_forced: bool) -> None:
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    body = ChatBody.model_validate({"messages": [], "response_format": wanted})
    state = known.begin(grammar_of(body, None, known._tokenizer))
    assert state and bool(state._matcher.compute_ff_tokens()) == is_forced


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_mark_of_a_call_may_be_an_added_token(choice: str) -> None:
    """As in the tokenizers of Qwen: llguidance takes it for a special one, whatever the tokenizer says."""
    tokenizer = HFTokenizer.load(model_path(None))
    tokenizer.inner.add_tokens(
        [AddedToken(one, special=False, normalized=False) for one in (Hermes.OPEN, Hermes.CLOSE)]
    )
    known = Grammars(tokenizer, {tokenizer.inner.eos_token_id}, len(tokenizer.inner))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}
    body = ChatBody.model_validate({"messages": [], "tools": [tool], "tool_choice": choice})
    for arguments, conforms in (('{"a": 1}', True), ('{"b": 1}', False)):
        state = known.begin(grammar_of(body, "hermes", tokenizer))
        text = f'{Hermes.OPEN}\n{{"name": "f", "arguments": {arguments}}}\n{Hermes.CLOSE}'
        call = tokenizer.encode(text, special=False)
        assert state and (state._matcher.validate_tokens(call) == len(call)) == conforms
