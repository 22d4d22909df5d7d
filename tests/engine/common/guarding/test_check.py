"""Checks as requests: what they ask for, and what they leave alone."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kedge.engine.common.guarding import check as check_module
from kedge.engine.common.guarding.check import MAX_PICK_TOKENS, Check, dense_check, translated_placeholders, trial
from kedge.guard import EVERYTHING, DecisionKind, GuardMode, GuardOrders
from kedge.reuse.guard.comparison import TOP, mean_divergence
from kedge.types import Completion, FinishReason, GenerateRequest, ReuseMode, SampleId, TokenLogprob, TurnHints
from tests.engine.common.guarding.test_guarded_calls import BAD, GOOD, request, spans_of
from tests.reuse.guard.answers import answer, position

ASKED = replace(
    request("a", "b", temperature=0.7, seed=3, max_tokens=500, grammar="start: /x/"),
    produces=SampleId.parse("agent_solver@0"), turn=TurnHints("session"), is_plain=True, tool_mark="<t>",
    guard=GuardOrders(withheld=frozenset("ab"), epoch=4),
)  # fmt: skip


@pytest.fixture(autouse=True)
def three_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "COMPARED_TOKENS", 3)


NO_TRACE = (None, TurnHints(), False, "")


def served(*names: str, first: TokenLogprob = GOOD) -> Completion:
    return answer(first, *[GOOD] * 9, spans=spans_of(replace(ASKED, guard=GuardOrders()), frozenset(names)))


def dense(asked: GenerateRequest, done: Completion, rungs: Sequence[int] = ()) -> tuple[Check, GenerateRequest]:
    """A check by dense prefill, and its first request."""
    check = dense_check(asked, done, rungs)
    return check, check.requests[0]


def test_a_dense_check_computes_the_whole_prompt_and_leaves_no_trace() -> None:
    check, again = dense(ASKED, served("a"))
    assert check.requests == (again,)
    assert (again.reuse, again.guard.mode, again.logprobs) == (ReuseMode.OFF, GuardMode.OFF, TOP)
    assert (again.workflow, again.agent, again.run) == ("", "", "")
    assert (again.sampling.temperature, again.sampling.seed, again.sampling.max_tokens) == (0.0, None, 3)
    assert again.segments == ASKED.segments
    assert (again.produces, again.turn, again.is_plain, again.tool_mark) == NO_TRACE
    assert again.request_id != ASKED.request_id and check.run is None


def test_a_trial_translates_one_withheld_placeholder_with_the_anchors_of_now() -> None:
    check = trial(ASKED, served(), "a", [2])
    (again,) = check.requests
    assert again.reuse is ReuseMode.TRANSLATE and check.run == ASKED.run_key
    orders = GuardOrders(
        GuardMode.OFF, frozenset("b"), 4, rung=2, recheck="a", held_out=True
    )  # nothing is learned, and its own anchors are left out
    assert again.guard == orders
    assert again.exact_limit == 1, "the served call's own KV is in the cache"


def test_a_trial_of_everything_is_one_request_for_every_rung_and_a_control() -> None:
    check = trial(ASKED, served(), EVERYTHING, [0, 2])
    *rungs, control = check.requests
    assert [one.guard.rung for one in rungs] == [0, 2]
    assert len({one.request_id for one in (ASKED, *check.requests)}) == 4
    assert (control.reuse, control.guard, control.exact_limit) == (
        ReuseMode.EXACT, GuardOrders(GuardMode.OFF), ASKED.prompt_tokens - 1,
    )  # fmt: skip
    assert (control.workflow, control.agent, control.run) == ("", "", "")
    assert len(trial(ASKED, served(), EVERYTHING, [None]).requests) == 1, "nothing is proved by it"
    assert len(trial(ASKED, served(), EVERYTHING, [0, 2], control=False).requests) == 2
    for one in rungs:
        assert not one.guard.withheld and one.guard.held_out and one.guard.epoch == 4
        assert one.exact_limit == 1 and one.run == ASKED.run


def test_beside_a_dense_check_other_rungs_are_tried() -> None:
    check, again = dense(replace(ASKED, guard=replace(ASKED.guard, rung=1)), served("a"), [0, 4])
    assert again.reuse is ReuseMode.OFF and [one.guard.rung for one in check.requests[1:]] == [0, 4]
    assert all(one.reuse is ReuseMode.TRANSLATE and one.guard.held_out for one in check.requests[1:])
    assert check.run == ASKED.run_key, "they need the base KV of the run"


def test_a_check_is_forced_to_what_was_served() -> None:
    """Sampled answers too; a constraint of what is drawn does not matter then."""
    stopping = replace(ASKED, sampling=replace(ASKED.sampling, temperature=0.0, stop=("x",)), tool_mark="")
    for asked in (ASKED, stopping):
        _, again = dense(asked, served("a", "b", first=BAD))
        assert again.forced == (2, 1, 1) and again.sampling.max_tokens == 3
        assert again.sampling.ignore_eos and not again.sampling.grammar and not again.sampling.stop
    short, _ = dense(ASKED, replace(served("a"), tokens=(1, 1), logprobs=(GOOD, GOOD)))
    assert short.requests[0].forced == (1, 1) and short.requests[0].sampling.max_tokens == 2


GREEDY = replace(ASKED, sampling=replace(ASKED.sampling, temperature=0.0, grammar=""), tool_mark="")


@pytest.mark.parametrize("asked, text", [
    (replace(GREEDY, guard=replace(GREEDY.guard, pick="Answer:")), ""), (replace(GREEDY, tool_mark="<t>"), ""),
    (GREEDY, '{"name": "look_up", "parameters": {}}'),
])  # fmt: skip
def test_an_answer_that_may_decide_something_is_given_freely(asked: GenerateRequest, text: str) -> None:
    check, again = dense(asked, replace(served("a"), text=text), [1])
    assert not any(one.forced for one in check.requests)
    assert not again.sampling.ignore_eos and again.sampling.grammar == asked.sampling.grammar
    sampled = replace(asked, sampling=replace(asked.sampling, temperature=0.7))
    assert dense(sampled, replace(served("a"), text=text))[1].forced, "a sampled answer's decisions are not compared"
    assert trial(asked, replace(served(), text=text), EVERYTHING, [1]).requests[-1].forced, "the control"


def test_a_check_that_waits_holds_no_more_of_an_answer_than_is_compared() -> None:
    check, _ = dense(ASKED, served("a"))
    assert (len(check.served.logprobs), check.served.tokens, check.served.prompt_logprobs) == (3, (), ())


def test_the_translated_answer_is_compared_with_the_dense_one_whichever_was_served() -> None:
    check, _ = dense(ASKED, served("a", "b", first=BAD))
    (seen,) = check.judge([served()])
    assert seen.names == ("a", "b") and seen.comparison.changed and seen.is_served and seen.finding is None
    (seen,) = trial(ASKED, served(), "a", [None]).judge([served("a", first=BAD)])
    assert seen.names == ("a",) and seen.comparison.changed and seen.is_served and seen.finding is None


def test_every_rung_gives_a_finding_beside_what_is_dense() -> None:
    """With the share that it computes of what the served call did not have from the cache."""
    far, near = served("a", "b", first=BAD), served("a")
    seen = trial(ASKED, served(), EVERYTHING, [0, 3]).judge([far, near, served()])
    found = [one.finding for one in seen]
    assert not any(one.is_served for one in seen) and [one and one.rung for one in found] == [0, 3]
    assert found[0] is not None and found[0].divergence == seen[0].comparison.kl > 0.1
    assert found[0].computed == pytest.approx(2 / ASKED.prompt_tokens)
    assert found[1] is not None and (found[1].divergence, found[1].computed) == (0.0, pytest.approx(12 / 22))
    on_rung = replace(ASKED, guard=replace(ASKED.guard, rung=2))
    mine, other = dense(on_rung, far, [0])[0].judge([served(), near])
    assert mine.is_served and mine.finding is not None and mine.finding.rung == 2 and mine.comparison.changed
    assert not other.is_served and other.finding is not None and other.finding.rung == 0
    assert not other.comparison.changed


@pytest.mark.parametrize("again", [served(), served("b"), replace(served("a"), logprobs=())])
def test_a_trial_in_which_nothing_was_translated_or_read_shows_nothing(again: Completion) -> None:
    assert trial(ASKED, served(), "a", [1]).judge([again]) == []
    assert trial(ASKED, served(), EVERYTHING, [0, 1]).judge([served(), served(), served()]) == []


def test_the_noise_of_rounding_is_the_divergence_of_the_control() -> None:
    check, near = trial(ASKED, served(), EVERYTHING, [0]), position({1: 0.91, 2: 0.09})
    noise = check.noise([served("a"), served(first=near)])
    assert noise is not None and noise == mean_divergence(check.served, served(first=near)) and 0 < noise < 0.001
    assert check.noise([served("a"), served(first=BAD)]) is None, "no rounding is so far off"
    assert check.noise([served("a"), None]) is None and dense(ASKED, served("a"))[0].noise([served()]) is None


def test_dense_prefill_without_numbers_shows_nothing() -> None:
    broken = TokenLogprob(1, math.nan, ((1, math.nan),))
    assert dense(ASKED, served("a"), [1])[0].judge([served(first=broken), served("a")]) == []


def test_a_placeholder_that_a_prompt_reads_twice_counts_once() -> None:
    twice = request("a", "b", "a")
    spans = spans_of(twice, frozenset("ab"))
    assert translated_placeholders(twice, answer(GOOD, spans=spans).receipt) == ("a", "b")


CALL = '{"name": "look_up", "parameters": {}}'


CUT: dict[str, Any] = {"finish_reason": FinishReason.LENGTH}
PICK = "Answer:"


@pytest.mark.parametrize(("mine", "again", "seen", "asks", "changes"), [
    (CALL, CALL, {}, {}, {"far": False, "call": False}),
    ("I look it up.", CALL, {}, {}, {"far": False, "call": True}),
    (CALL, CALL[:12], CUT, {}, {"far": False, "call": False}),
    ("It is B. Answer: B", "It is", CUT, {"pick": PICK, "max_tokens": 5000}, {"far": False, "call": False}),
    ("Hm. Answer: B", "So: Answer: C", {}, {"pick": PICK}, {"far": False, "call": False, "pick": True}),
    ("Hm. Answer: B", "So: Answer: B", {}, {"pick": PICK}, {"far": False, "call": False, "pick": False}),
    ("I look it up.", CALL, {}, {"temperature": 0.7}, {"far": False}),
], ids=["calls", "prose", "cut off", "cut before its pick", "another pick", "the same pick", "sampled"])  # fmt: skip
def test_decisions_in_answers_are_compared_as_far_as_they_go_unless_they_are_sampled(
    mine: str, again: str, seen: dict[str, Any], asks: dict[str, Any], changes: dict[str, bool]
) -> None:
    """Where a tool may be called, though the distributions are near."""
    pick, sampling = asks.get("pick", ""), {name: value for name, value in asks.items() if name != "pick"}
    params = replace(ASKED.sampling, **{"temperature": 0.0, **sampling})
    asked = replace(ASKED, guard=replace(ASKED.guard, pick=pick), sampling=params)
    (found,) = dense(asked, replace(served("a"), text=mine))[0].judge([replace(served(), text=again, **seen)])
    assert found.names == ("a",)
    assert {kind.value: changed for kind, changed in found.comparison.changes.items()} == changes


def test_a_pick_needs_the_whole_answer_of_a_greedy_call() -> None:
    asked = replace(ASKED, guard=GuardOrders(pick=PICK), sampling=replace(ASKED.sampling, temperature=0.0))
    for more, taken in ({}, 500), ({"max_tokens": 10**6}, MAX_PICK_TOKENS), ({"temperature": 0.7}, 3):
        again = dense(replace(asked, sampling=replace(asked.sampling, **more)), served("a"))[1]
        assert again.sampling.max_tokens == taken


def test_a_forced_answer_says_nothing_of_decisions() -> None:
    """Its text is what was served, whatever the model says."""
    check, again = dense(GREEDY, replace(served("a"), text="Let me see."))
    (seen,) = check.judge([replace(served(), text=CALL)])
    assert again.forced and set(seen.comparison.changes) == {DecisionKind.FAR}


def test_a_call_in_place_of_prose_on_a_rung_that_is_only_tried_is_no_change() -> None:
    """What is served is compared, and a trial of a withheld placeholder; rungs are bounded by their divergence."""
    asked = replace(GREEDY, tool_mark="<t>")
    check, _ = dense(asked, replace(served("a"), text=CALL), [1])
    mine, other = check.judge([replace(served(), text=CALL), replace(served("a"), text="Hm.")])
    assert set(mine.comparison.changes) == {DecisionKind.FAR, DecisionKind.CALL}
    assert set(other.comparison.changes) == {DecisionKind.FAR} and not other.is_served
