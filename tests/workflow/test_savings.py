"""The estimate of what prompts would save, on a tokenizer whose tokens are characters: every count is one by hand."""

from itertools import islice

import pytest

from kedge import LocalEngine, run
from kedge.types import ReuseMode, ValueKind
from kedge.workflow.graph import Agent, Workflow
from kedge.workflow.savings import BLOCK, CallSavings, ValueLengths, estimate_savings
from kedge.workloads.miniature import MATH, questions
from tests.workflow.test_template import Characters

FOUR = ValueLengths(input=4 * BLOCK, answer=4 * BLOCK)


class Unwrapped(Characters):
    """Wraps messages in nothing."""

    def chat(self, system: str | None, user: str) -> str:
        return (system or "") + user


def blocks(letter: str, count: int) -> str:
    """A text of whole blocks."""
    return letter * BLOCK * count


def counts(*agents: Agent, lengths: ValueLengths = FOUR, turns: int = 1) -> list[tuple[int, int, int, int]]:
    """Prompt, prefix, role last and translation of every call, in blocks (what is left of one counts for nothing)."""
    found = estimate_savings(Workflow("test", agents, turns=turns), Unwrapped(), lengths).calls
    return [tuple(n // BLOCK for n in (c.prompt, c.prefix, c.role_last, c.translation)) for c in found]  # type: ignore[misc]


def test_a_role_in_front_hides_the_question_and_the_share_of_a_run_weighs_calls_by_their_prompts() -> None:
    a, b = (Agent(name, blocks(name, 2), "{user_question}" + blocks(name, 1)) for name in "ab")
    # a computes the question and its own end; role last finds nothing of it, since the question is new.
    # b: the question is known. By its own last token it can never be all.
    assert counts(a, b) == [(7, 2, 0, 2), (7, 2, 4, 6)]
    savings = estimate_savings(Workflow("test", (a, b)), Unwrapped(), FOUR)
    assert savings.share("role_last") == pytest.approx(4 / 14)
    assert savings.calls[0] == CallSavings(savings.calls[0].step, 7 * BLOCK, 2 * BLOCK, 0, 2 * BLOCK)


def test_an_answer_is_computed_by_its_first_reader_unless_it_is_translated() -> None:
    a = Agent("a", blocks("a", 1), "{user_question}")
    b, c = (Agent(name, blocks(name, 1), "{user_question}{agent_a_current}" + name) for name in "bc")
    assert counts(a, b, c) == [(5, 1, 0, 1), (9, 1, 4, 9), (9, 1, 8, 9)]


def test_an_agent_that_must_be_exact_translates_nothing() -> None:
    a = Agent("a", blocks("a", 1), "{user_question}")
    exact = Agent("b", blocks("b", 1), "{user_question}", reuse=ReuseMode.EXACT)
    off = Agent("c", blocks("c", 1), "{user_question}", reuse=ReuseMode.OFF)
    assert [call[3] for call in counts(a, exact, off)] == [1, 1, 0]


def test_a_later_turn_finds_the_prompt_of_the_turn_before_up_to_what_is_new() -> None:
    a = Agent("a", blocks("a", 1), "{user_question}" + blocks("y", 1) + "{agent_a_history_1}" + blocks("z", 1))
    assert counts(a, turns=2) == [(7, 1, 1, 1), (11, 6, 5, 10)]


def test_lengths_by_name_go_first_and_answers_end_at_max_tokens() -> None:
    flow = Workflow("test", (Agent("a", "", "{user_question}", max_tokens=7),))
    lengths = ValueLengths(input=5, answer=9, named={"user_question": 6})
    assert [
        lengths.of(flow, kind, of) for kind, of in ((ValueKind.INPUT, "user_question"), (ValueKind.AGENT, "a"))
    ] == [6, 7]


def test_the_embedded_engine_finds_as_many_tokens_as_estimated() -> None:
    team, (before, asked) = MATH.workflow(), list(islice(questions(1), 3))[1:]
    assert before.text.split()[0] != asked.text.split()[0]  # the estimate takes questions to differ from the start
    with LocalEngine() as engine:
        for question in (before, asked):
            result = run(engine, team, {"user_question": question.text}, reuse=ReuseMode.EXACT)
        encode = engine.tokenizer.encode
        named = {"user_question": len(encode(asked.text, special=False))}
        for said in result.results:
            named[f"agent_{said.agent}"] = len(said.completion.tokens)
            named[f"condition_{said.agent}"] = len(encode(said.tool_result or "", special=False))
        savings = estimate_savings(team, engine.tokenizer, ValueLengths(named=named))
    receipts = [said.completion.receipt for said in result.results]
    assert [call.prompt for call in savings.calls] == [r.exact + r.computed for r in receipts]
    found = [r.exact - call.prefix for call, r in zip(savings.calls, receipts, strict=True)]
    assert all(0 <= more < BLOCK for more in found), "the engine finds beginnings of blocks, too"
