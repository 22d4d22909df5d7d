"""Checks as requests: what they ask for, and what they leave alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from kedge.engine.common.guarding.check import MAX_PICK_TOKENS, dense_check, translated_placeholders, trial
from kedge.guard import GuardMode, GuardOrders
from kedge.reuse.guard.comparison import TOP
from kedge.settings import GuardSettings
from kedge.types import Completion, FinishReason, ReuseMode, SampleId, TokenLogprob, TurnHints
from tests.engine.common.guarding.fakes import BAD, GOOD, request, spans_of
from tests.reuse.guard.answers import answer

SETTINGS = GuardSettings(tokens=3)
ASKED = replace(
    request("a", "b", temperature=0.7, seed=3, max_tokens=500, grammar="start: /x/"),
    produces=SampleId.parse("agent_solver@0"), trail=(1, 2), turn=TurnHints("session"), is_plain=True, tool_mark="<t>",
    guard=GuardOrders(withheld=frozenset("ab"), epoch=4),
)  # fmt: skip

NO_TRACE = (None, (), TurnHints(), False, "")


def served(*names: str, first: TokenLogprob = GOOD) -> Completion:
    return answer(first, *[GOOD] * 9, spans=spans_of(replace(ASKED, guard=GuardOrders()), frozenset(names)))


def test_a_dense_check_computes_the_whole_prompt_and_leaves_no_trace() -> None:
    check = dense_check(ASKED, served("a"), SETTINGS)
    again = check.request
    assert (again.reuse, again.guard.mode, again.logprobs) == (ReuseMode.OFF, GuardMode.OFF, TOP)
    assert (again.workflow, again.agent, again.run) == ("", "", "")
    assert (again.sampling.temperature, again.sampling.seed, again.sampling.max_tokens) == (0.0, None, 3)
    assert again.sampling.grammar == ASKED.sampling.grammar and again.segments == ASKED.segments
    assert (again.produces, again.trail, again.turn, again.is_plain, again.tool_mark) == NO_TRACE
    assert again.request_id != ASKED.request_id and check.run is None and check.cost == ASKED.prompt_tokens + 3


def test_a_trial_translates_one_withheld_placeholder_with_the_anchors_of_now() -> None:
    check = trial(ASKED, served(), SETTINGS, "a")
    assert check.request.reuse is ReuseMode.TRANSLATE and check.run == ASKED.run_key
    assert check.request.guard == GuardOrders(GuardMode.OFF, frozenset("b"), 4, "a")
    assert check.request.exact_limit == 1, "the served call's own KV is in the cache"


def test_a_check_that_waits_holds_no_more_of_an_answer_than_is_compared() -> None:
    check = dense_check(ASKED, served("a"), SETTINGS)
    assert (len(check.served.logprobs), check.served.tokens, check.served.prompt_logprobs) == (3, (), ())


def test_the_translated_answer_is_compared_with_the_dense_one_whichever_was_served() -> None:
    check = dense_check(ASKED, served("a", "b", first=BAD), SETTINGS)
    names, seen = check.judge(served(), 2.0) or ((), None)
    assert names == ("a", "b") and seen is not None and seen.changed
    check = trial(ASKED, served(), SETTINGS, "a")
    names, seen = check.judge(served("a", first=BAD), 2.0) or ((), None)
    assert names == ("a",) and seen is not None and seen.changed


@pytest.mark.parametrize("again", [served(), served("b"), replace(served("a"), logprobs=())])
def test_a_trial_in_which_nothing_was_translated_or_read_shows_nothing(again: Completion) -> None:
    assert trial(ASKED, served(), SETTINGS, "a").judge(again, 2.0) is None


def test_dense_prefill_without_numbers_shows_nothing() -> None:
    broken = TokenLogprob(1, math.nan, ((1, math.nan),))
    assert dense_check(ASKED, served("a"), SETTINGS).judge(served(first=broken), 2.0) is None


def test_a_placeholder_that_a_prompt_reads_twice_counts_once() -> None:
    twice = request("a", "b", "a")
    spans = spans_of(twice, frozenset("ab"))
    assert translated_placeholders(twice, answer(GOOD, spans=spans).receipt) == ("a", "b")


CALL = '{"name": "look_up", "parameters": {}}'


def judged(mine: str, again: str, *, pick: str = "", reason: FinishReason = FinishReason.STOP, **sampling: Any) -> Any:
    """What differs between a served answer and a check's."""
    params = replace(ASKED.sampling, **{"temperature": 0.0, **sampling})
    asked = replace(ASKED, guard=replace(ASKED.guard, pick=pick), sampling=params)
    check = dense_check(asked, replace(served("a"), text=mine), SETTINGS)
    names, seen = check.judge(replace(served(), text=again, finish_reason=reason), 2.0) or ((), None)
    assert names == ("a",) and seen is not None
    return {kind.value: changed for kind, changed in seen.changes.items()}


def test_a_call_in_place_of_prose_is_a_change_though_no_token_is_clearly_another() -> None:
    assert judged(CALL, CALL) == {"wording": False, "call": False}
    assert judged("I look it up.", CALL) == {"wording": False, "call": True}


def test_a_check_that_was_cut_off_says_what_it_can() -> None:
    assert not judged(CALL, CALL[:12], reason=FinishReason.LENGTH)["call"]
    seen = judged("It is B. Answer: B", "It is", pick="Answer:", reason=FinishReason.LENGTH, max_tokens=5000)
    assert seen == {"wording": False, "call": False}


def test_a_pick_is_compared_and_needs_the_whole_answer() -> None:
    assert judged("Hm. Answer: B", "So: Answer: C", pick="Answer:") == {"wording": False, "call": False, "pick": True}
    assert judged("Hm. Answer: B", "So: Answer: B", pick="Answer:")["pick"] is False
    asked = replace(ASKED, guard=GuardOrders(pick="Answer:"), sampling=replace(ASKED.sampling, temperature=0.0))
    assert dense_check(asked, served("a"), SETTINGS).request.sampling.max_tokens == 500
    long = replace(asked, sampling=replace(asked.sampling, max_tokens=10**6))
    assert dense_check(long, served("a"), SETTINGS).request.sampling.max_tokens == MAX_PICK_TOKENS
    sampled = replace(asked, sampling=replace(asked.sampling, temperature=0.7))
    assert dense_check(sampled, served("a"), SETTINGS).request.sampling.max_tokens == 3


def test_texts_of_sampled_answers_are_not_compared() -> None:
    assert judged("I look it up.", CALL, temperature=0.7) == {"wording": False}
