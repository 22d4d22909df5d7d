"""Prompts that are assembled ahead of requests: not one token changes, and no block is lost where none come."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kedge.engine.base import Engine
from kedge.engine.local.core import EngineCore
from kedge.engine.local.engine import LocalEngine
from kedge.engine.local.scheduler import AHEAD_CHUNK
from kedge.engine.local.sequence import RequestSequence
from kedge.errors import TranslationRefused
from kedge.runner.run import run
from kedge.settings import PlannerConstants, TierSettings
from kedge.types import AgentKey, GenerateRequest, ReuseMode, SampleId, SamplingParams, Segment, TenantId, Tokens
from kedge.workflow.graph import Agent, Workflow
from kedge.workflow.steps import NextRun
from tests.engine.local.conftest import engine_of, tiny_model
from tests.engine.local.stepping import (
    ANSWER,
    ASKED,
    PLANNER,
    QUESTION,
    RUN,
    RUN_KEY,
    SPACE,
    TEMPLATE,
    Stage,
    outcome,
    pieces,
    prompt_of,
    taught,
)
from tests.engine.local.test_translation import tokens

# hints that come true -----------------------------------------------------------------------------------------------


def compared(
    make: Callable[[], Stage],
    ask: Callable[[Stage], GenerateRequest],
    prepare: Callable[[Stage, GenerateRequest], None] = Stage.prepare,
) -> tuple[Stage, RequestSequence]:
    """Serve a request with and without preparation, which makes no difference. Returns how it is with it."""
    plain = make()
    expected = outcome(plain.serve(ask(plain)))
    stage = make()
    request = ask(stage)
    prepare(stage, request)
    sequence = stage.serve(replace(request, request_id="asked"))
    assert outcome(sequence) == expected
    return stage, sequence


@pytest.mark.parametrize("reuse", [ReuseMode.TRANSLATE, ReuseMode.EXACT])
def test_only_the_last_token_is_left_and_no_token_changes(reuse: ReuseMode) -> None:
    stage, sequence = compared(taught, lambda stage: prompt_of("reader", ASKED, stage.answer, reuse))
    assert sequence.preassembled == sequence.receipt().preassembled == sequence.request.prompt_tokens - 1
    assert (sequence.receipt().translated > 0) == (reuse is ReuseMode.TRANSLATE)
    assert (stage.told["used"], stage.leased) == (1, 0)
    stage = taught()
    stage.prepare(request := prompt_of("reader", ASKED, stage.answer, reuse))
    sequence = stage.submit(request)
    stage.step()
    assert sequence.first_token is not None, "one step is all that was left"
    stage.rest()


def test_a_prompt_grows_while_the_one_before_it_is_being_answered() -> None:
    stage = taught()
    writer = stage.submit(prompt_of("writer", ASKED, produces="agent_writer@0", max_tokens=ANSWER))
    stage.core.parts.preassembly.expect(prompt_of("reader", ASKED, ()))
    while writer.first_token is None:
        assert stage.told["begun"] == 0, "somebody waits for a first token"
        stage.step()
    stage.until(lambda: writer.finish)
    [one] = stage.core.parts.preassembly.expected.values()
    assert one.ready == TEMPLATE[0] + QUESTION + TEMPLATE[1], "all up to the answer"
    stage.rest()
    assert one.ready == one.request.prompt_tokens - 1, "the answer followed by itself"
    stage.learn()
    request = prompt_of("reader", ASKED, tuple(writer.response))
    sequence = stage.serve(request)
    assert sequence.preassembled == request.prompt_tokens - 1
    assert outcome(stage.fresh().serve(replace(request, request_id="plain"))) == outcome(sequence)


@pytest.mark.parametrize("steps", range(1, 10))
def test_a_request_that_comes_early_takes_what_is_there(steps: int) -> None:
    """At whatever piece of the work it arrives, in both modes."""

    def begin(stage: Stage, request: GenerateRequest) -> None:
        stage.core.parts.preassembly.expect(request)
        stage.step(steps)

    for reuse in (ReuseMode.TRANSLATE, ReuseMode.EXACT):
        compared(taught, lambda stage, reuse=reuse: prompt_of("reader", ASKED, stage.answer, reuse), begin)


def test_a_value_that_is_not_shareable_makes_all_of_the_prompt_dense() -> None:
    """What was translated ahead before the answer was known must not be seen by anybody."""

    def make() -> Stage:
        stage = Stage()
        for at in range(3):
            stage.serve(prompt_of("writer", tokens(50 + at, QUESTION), run=f"past-{at}"))
            stage.serve(prompt_of("reader", tokens(50 + at, QUESTION), (), run=f"past-{at}"))
        stage.core.parts.cache.clear()
        return stage

    def prepare(stage: Stage, request: GenerateRequest) -> None:
        stage.prepare(pieces(request))
        [one] = stage.core.parts.preassembly.expected.values()
        assert one.translates, "so far it looked good"

    _, sequence = compared(make, lambda stage: prompt_of("reader", ASKED, stage.write(ASKED)), prepare)
    assert sequence.plan is not None and not sequence.plan.translates
    assert sequence.preassembled == sequence.receipt().exact


def test_an_answer_that_no_anchor_knows_may_be_moved_ahead() -> None:
    planner = PLANNER.model_copy(update={"move": "unlearned"})
    _, sequence = compared(lambda: Stage(planner=planner), lambda stage: prompt_of("reader", ASKED, stage.write(ASKED)))
    assert sequence.plan is not None and sequence.plan.translates and sequence.plan.teaches
    assert sequence.preassembled > 0


def test_a_prompt_of_which_too_little_could_be_translated_is_dense() -> None:
    planner = PlannerConstants(by_cost=False, recompute_head=2, min_translated=0.99)
    _, sequence = compared(
        lambda: taught(planner),
        lambda stage: prompt_of("reader", ASKED, stage.answer),
        lambda stage, request: stage.prepare(pieces(request)),
    )
    assert "of the prompt could be translated" in sequence.receipt().misses[-1].reason


def test_a_dense_prompt_that_was_computed_ahead_is_learned_from() -> None:
    stage = Stage()
    stage.serve(prompt_of("reader", ASKED, tokens(71, ANSWER)))  # leaves the base KV of its template
    before = stage.core.parts.stats()["anchors"]["observed"]
    request = prompt_of("reader", ASKED, tokens(72, ANSWER))
    stage.prepare(request)
    sequence = stage.serve(request)
    assert sequence.preassembled == request.prompt_tokens - 1
    assert not sequence.plan.translates
    assert stage.core.parts.stats()["anchors"]["observed"] > before


# hints that do not come true ----------------------------------------------------------------------------------------


OTHERS: dict[str, tuple[Callable[[GenerateRequest], GenerateRequest], bool]] = {
    "question": (lambda one: prompt_of("reader", tokens(99, QUESTION), one.segments[3].tokens), True),
    "mode": (lambda one: replace(one, reuse=ReuseMode.EXACT), True),
    "wording": (lambda one: replace(one, segments=(*one.segments[:-1], Segment(tokens(98, 7), "p2"))), True),
    "workflow": (lambda one: replace(one, workflow="another"), True),
    "no answer": (lambda one: replace(one, segments=(*one.segments[:3], one.segments[4])), True),
    "no reuse": (lambda one: replace(one, reuse=ReuseMode.OFF), True),
    "agent": (lambda one: replace(one, agent="writer"), False),
    "run": (lambda one: replace(one, run="another"), False),
    "client": (lambda one: replace(one, client="another"), False),
    "tenant": (lambda one: replace(one, tenant="another"), False),
}
"""Requests other than the expected one, and whether that is not going to come after them"""


@pytest.mark.parametrize(("change", "ends_it"), OTHERS.values(), ids=OTHERS)
def test_another_request_does_not_take_it_and_one_of_the_agent_throws_it_away(
    change: Callable[[GenerateRequest], GenerateRequest], ends_it: bool
) -> None:
    stage, outcomes = taught(), []
    request = prompt_of("reader", ASKED, stage.answer)
    asked = replace(change(request), request_id="other")
    for _ in range(3):  # until it teaches nothing new
        stage.fresh().serve(asked)
    stage.fresh()
    for ahead in (False, True):
        if ahead:
            stage.fresh().prepare(request)
        sequence = stage.serve(asked)
        outcomes.append(outcome(sequence))
        assert sequence.preassembled == 0
        stage.core.parts.cache.clear()
    assert outcomes[0] == outcomes[1]
    assert (stage.told["wasted"], stage.told["live"], stage.leased > 0) == (ends_it, not ends_it, not ends_it)


def test_a_newer_hint_replaces_an_older_one_that_it_contradicts_and_no_newer_one() -> None:
    stage = taught()
    first, second = (prompt_of("reader", tokens(seed, QUESTION), tokens(seed + 1, ANSWER)) for seed in (70, 80))
    for hint in (first, second, pieces(second)):
        stage.prepare(hint)
    assert (stage.told["wasted"], stage.told["live"]) == (1, 1)
    assert stage.serve(second).preassembled == second.prompt_tokens - 1


def test_exact_kv_under_another_value_is_never_taken_for_its_own() -> None:
    """The hint's exact prefix covers values that the request does not have, though nothing has been drafted yet."""
    stage = Stage()
    known = prompt_of("reader", ASKED, tokens(71, ANSWER), ReuseMode.EXACT)
    stage.serve(known)
    stage.core.parts.preassembly.expect(replace(known, request_id="hint"))
    assert stage.core.parts.preassembly.assemble(), "blocks only"
    other = prompt_of("reader", ASKED, tokens(90, ANSWER), ReuseMode.EXACT)
    stage.core.parts.preassembly.expect(other)
    served = stage.serve(replace(other, request_id="other"))
    assert tuple(served.response) == tuple(Stage().serve(other).response)


def test_where_the_cache_knows_more_exactly_that_is_taken() -> None:
    stage = taught()
    request = prompt_of("reader", ASKED, stage.answer)
    stage.prepare(request)
    stage.serve(prompt_of("reader", *(request.segments[at].tokens for at in (1, 3)), ReuseMode.EXACT, run="another"))
    sequence = stage.serve(request)
    assert sequence.receipt().exact > TEMPLATE[0] + QUESTION
    assert (sequence.preassembled, stage.told["wasted"]) == (0, 1)


@pytest.mark.parametrize("answer", [(), tokens(71, 20 * 16)], ids=["empty", "too long"])
def test_an_answer_that_means_another_prompt_ends_it(answer: Tokens) -> None:
    stage = Stage(kv_memory="20 blocks")
    stage.prepare(prompt_of("reader", ASKED, ()))
    stage.core.parts.preassembly.answered(RUN_KEY, SampleId.parse("agent_writer@0"), answer)
    stage.check()
    assert (stage.told["wasted"], stage.leased) == (1, 0)


# ends ---------------------------------------------------------------------------------------------------------------


ENDS: dict[str, Callable[[EngineCore, GenerateRequest], object]] = {
    "run": lambda core, hint: core.end_run(hint.run_key),
    "cancelled": lambda core, hint: core.requests.cancel(hint.request_id),
    "later": lambda core, hint: core.forecast({hint.agent_key: NextRun(2.0)}, {}),
    "never": lambda core, hint: core.forecast({hint.agent_key: None}, {}),
    "cleared": lambda core, _: core.clear(),
    "closed": lambda core, _: core.shut(None),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("reuse", [ReuseMode.TRANSLATE, ReuseMode.EXACT])
def test_how_it_is_cancelled(end: str, reuse: ReuseMode) -> None:
    stage = Stage()
    hint = prompt_of("reader", ASKED, tokens(71, ANSWER), reuse)
    stage.core.parts.preassembly.expect(hint)
    stage.step(3)
    stage.core.forecast({hint.agent_key: NextRun(1.0)}, {})
    assert stage.leased > 0, "it is still near"
    ENDS[end](stage.core, hint)
    stage.check()
    assert (stage.told["cancelled"], stage.told["live"], stage.leased) == (1, 0, 0)
    assert not stage.core.parts.preassembly.pending and not stage.core.requests.cancel(hint.request_id)


def test_a_request_that_is_cancelled_before_it_was_admitted_takes_its_preparation_along() -> None:
    stage = taught()
    request = prompt_of("reader", ASKED, tokens(71, ANSWER))
    stage.prepare(replace(request, request_id="hint"))
    stage.submit(request)
    assert stage.core.requests.cancel(request.request_id)
    stage.check()
    assert (stage.told["cancelled"], stage.leased) == (1, 0)


def test_only_so_many_are_kept_and_not_at_the_cost_of_another_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.reuse.ahead.MAX_PENDING", 4)
    stage = Stage(kv_memory="600 blocks")
    for at in range(4 + 3):
        stage.prepare(replace(prompt_of(f"agent-{at}", ASKED, ()), tenant=TenantId("default" if at else "other")))
    assert (stage.told["live"], stage.told["cancelled"]) == (4, 3)
    assert [one.namespace.tenant for one in stage.core.parts.preassembly.expected] == ["other", *["default"] * 3]


# pressure -----------------------------------------------------------------------------------------------------------


def test_a_request_may_need_the_blocks_that_another_one_has_claimed() -> None:
    """Where requests are served in the order of arrival."""
    stage = Stage(kv_memory="20 blocks", tiers=TierSettings(policy="steps"))
    claimed = prompt_of("reader", ASKED, tokens(71, ANSWER), ReuseMode.EXACT)
    stage.prepare(claimed)
    first = stage.submit(prompt_of("writer", tokens(80, 200), max_tokens=30))
    second = stage.submit(claimed)
    stage.rest()
    assert (len(first.response), len(second.response)) == (30, 6)
    assert (second.preassembled, stage.told["given_back"], stage.leased) == (0, 1, 0)
    assert tuple(second.response) == tuple(Stage().serve(replace(claimed, request_id="x")).response)


def test_a_request_that_loses_its_blocks_is_neither_prepared_nor_loaded_any_more() -> None:
    stage = taught()
    request = prompt_of("reader", ASKED, stage.answer)
    stage.prepare(replace(request, request_id="hint"))
    sequence = stage.submit(request)
    sequence.is_check, sequence.load_asked = True, sequence.arrival
    stage.core.scheduler.schedule()
    stalled = stage.stats("loading")["stall_s"]
    assert sequence.preassembled and sequence.parts["load"] > 0
    assert stage.core.requests.preempt(stage.sequence(replace(request, tenant="other")))
    stage.rest()
    told = sequence.receipt()
    assert (told.preassembled, stage.stats("loading")["stall_s"]) == (0, stalled) and "load" not in told.parts_ms


def test_without_room_it_waits_until_there_is_some() -> None:
    stage = Stage(kv_memory="20 blocks")
    running = stage.submit(prompt_of("writer", tokens(80, 200), max_tokens=40))
    stage.until(lambda: running.first_token)
    stage.core.parts.preassembly.expect(prompt_of("reader", ASKED, tokens(71, ANSWER), ReuseMode.EXACT))
    while not running.finish:
        stage.step()
        assert stage.told["begun"] == 0
    stage.rest()
    assert stage.told["live"] == 1


@pytest.mark.parametrize("answered", [False, True])
def test_only_what_is_needed_later_is_evicted_for_it(answered: bool) -> None:
    """Neither for its first blocks nor for those of an answer that comes later."""
    stage = Stage(kv_memory="12 blocks")
    near, fixed = AgentKey(SPACE, "client", RUN, "near"), tokens(5, 96)
    stage.core.forecast({near: NextRun(1.0)}, {})
    segments = (Segment(fixed, "p0"), Segment(tokens(6, 3), "x", SampleId.parse("x")))
    stage.serve(
        GenerateRequest(segments, SamplingParams(1), ReuseMode.EXACT, client="client", run=RUN, agent=near.agent)
    )
    expected = prompt_of("reader", ASKED, tokens(71, ANSWER), ReuseMode.EXACT)
    stage.prepare(pieces(expected) if answered else expected)
    if answered:
        stage.core.parts.preassembly.answered(RUN_KEY, SampleId.parse("agent_writer@0"), tokens(71, ANSWER))
        stage.rest()
    [one] = stage.core.parts.preassembly.expected.values()
    assert (one.admitted, one.drafts_on) == (answered, True)
    assert stage.core.parts.cache.status(SPACE, fixed).device_tokens == 96
    stage.core.forecast({near: NextRun(3.0)}, {})
    stage.core.parts.preassembly.wake()
    stage.rest()
    assert one.ready == expected.prompt_tokens - 1
    assert stage.core.parts.cache.status(SPACE, fixed).device_tokens < 96


def test_beside_decodes_only_what_repairs_a_translation_is_computed() -> None:
    stage = taught()
    stage.serve(prompt_of("writer", tokens(80, QUESTION)))  # so that nothing is left to be learned from it
    running = stage.submit(prompt_of("writer", tokens(80, QUESTION), max_tokens=60))
    stage.until(lambda: running.first_token)
    dense = prompt_of("stranger", ASKED, tokens(71, ANSWER), ReuseMode.EXACT)
    stage.core.parts.preassembly.expect(dense)
    while not running.finish:
        for work in stage.core.scheduler.schedule():
            assert work.sequence is running or len(work.positions) == 0
        stage.step()
    [one] = stage.core.parts.preassembly.expected.values()
    assert one.ready == 0
    while one.ready < one.request.prompt_tokens - 1:
        before = one.ready
        stage.step()
        assert one.ready - before <= AHEAD_CHUNK
    assert stage.serve(replace(dense, request_id="x")).preassembled == dense.prompt_tokens - 1


def test_a_demanded_load_without_room_gets_the_blocks() -> None:
    stage = Stage(kv_memory="12 blocks", tiers=TierSettings(host_memory="100 blocks", backup_hits=0))
    known = GenerateRequest((Segment(tokens(5, 150), "p0"),), SamplingParams(2, ignore_eos=True), ReuseMode.EXACT)
    stage.serve(known)
    stage.prepare(prompt_of("reader", ASKED, tokens(71, ANSWER), ReuseMode.EXACT))
    assert stage.told["live"] == 1
    again = stage.serve(replace(known, request_id="again"))
    assert (stage.told["given_back"], stage.leased) == (1, 0)
    assert len(again.response) == 2


# faults -------------------------------------------------------------------------------------------------------------


def fails(*_: object) -> None:
    """Stand for what the model or a translation may raise."""
    raise TranslationRefused("offset", 1, "on purpose")


@pytest.mark.parametrize(
    ("part", "name", "reuse"), [("runner", "forward", ReuseMode.EXACT), ("", "write", ReuseMode.TRANSLATE)]
)
def test_what_fails_for_it_ends_it_and_nobody_else(
    part: str, name: str, reuse: ReuseMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = taught()
    request, parts = prompt_of("reader", ASKED, stage.answer, reuse), stage.core.parts
    with monkeypatch.context() as patch:
        patch.setattr(getattr(parts, part) if part else parts, name, fails)
        stage.prepare(replace(request, request_id="hint"))
    assert (stage.told["failed"], stage.leased) == (1, 0)
    served = stage.serve(request)
    assert len(served.response) == 6 and (served.receipt().translated > 0) == (reuse is ReuseMode.TRANSLATE)


@pytest.mark.parametrize("seed", range(6))
def test_random_hints_change_no_token(seed: int) -> None:
    """Hints in any order, right, wrong and half known, with little room: answers are those of dense prefill."""
    rng = random.Random(seed)
    stage = Stage(kv_memory="26 blocks", tiers=TierSettings(host_memory="30 blocks", backup_hits=0))
    plain = Stage(kv_memory="200 blocks")
    agents, questions, answers = ("a", "bb", "ccc"), (tokens(1, 30), tokens(2, 45)), (tokens(3, 12), tokens(4, 20), ())
    live: list[RequestSequence] = []
    for _ in range(60):
        request = prompt_of(rng.choice(agents), rng.choice(questions), rng.choice(answers), ReuseMode.EXACT)
        match rng.randrange(8):
            case 0 | 1 | 2:
                stage.core.parts.preassembly.expect(request)
            case 3 | 4 if request.segments[3].tokens:
                live.append(stage.submit(request))
            case 5:
                stage.core.parts.preassembly.answered(RUN_KEY, SampleId.parse("agent_writer@0"), rng.choice(answers))
            case 6 if live:
                stage.core.requests.cancel(rng.choice(live).key)
        stage.check()
        stage.step(rng.randrange(4))
    stage.rest()
    for sequence in live:
        expected = plain.serve(replace(sequence.request, request_id=f"p-{sequence.key}", reuse=ReuseMode.OFF))
        assert sequence.response == expected.response[: len(sequence.response)]
    assert stage.told["begun"] > 5
    stage.core.end_run(RUN_KEY)
    stage.check()
    assert stage.leased == 0


# the engine with its thread -----------------------------------------------------------------------------------------


def test_hints_that_could_not_be_served_are_none() -> None:
    with engine_of(tiny_model("llama"), kv_memory="8 blocks") as engine:
        good = prompt_of("reader", ASKED, ())
        bad: list[dict[str, Any]] = [{"reuse": ReuseMode.OFF}, {"agent": ""}]
        bad += [{"segments": (Segment(one, "p0"),)} for one in ((), (-1,), (10**9,), tokens(1, 8 * 16))]
        for changes in bad:
            engine.prepare(replace(good, **changes))
        engine.wait_idle(60)
        assert engine.inspect()["preassembly"]["begun"] == 0
        engine.prepare(good)
        engine.wait_idle(60)
        assert engine.inspect()["preassembly"]["live"] == 1
        assert engine.cancel(good.request_id)
    engine.prepare(good)


def test_while_a_tool_runs_the_next_agents_prompt_is_assembled() -> None:
    read = "Q {user_question} said {agent_a_current} and got {condition_a_current} so"
    asked, answers = {"user_question": "how many ships lie at anchor?"}, []
    for prepares in (False, True):
        with engine_of(tiny_model("llama")) as engine:

            def slowly(answer: str, inputs: Mapping[str, str], engine: LocalEngine = engine) -> str:  # noqa: ARG001
                engine.wait_idle(60)
                return answer.upper()

            first = Agent("a", "sys", "Q {user_question}", max_tokens=8, tool=slowly, tool_seconds=60)
            team = Workflow("tools", (first, Agent("b", "", read, max_tokens=8)))
            if not prepares:
                engine.prepare = partial(Engine.prepare, engine)  # type: ignore[method-assign] - which does nothing
            done = run(engine, team, asked)
            answers.append([said.completion.tokens for said in done.results])
            receipt = done.of("b").completion.receipt
            engine.wait_idle(60)
            told: Any = engine.inspect()
        assert (receipt.preassembled > receipt.prompt_tokens // 2) == prepares
        assert told["preassembly"]["used"] == prepares
        assert (told["preassembly"]["live"], told["cache"]["leased_blocks"]) == (0, 0)
    assert answers[0] == answers[1]
