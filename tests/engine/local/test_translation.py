"""Translation inside the engine: what is written, what is recorded, and what is never shared."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from transformers import HunYuanDenseV1Config, PreTrainedModel

from kedge.anchors.estimators import ESTIMATORS
from kedge.engine.local.build import EngineParts
from kedge.engine.local.engine import LocalEngine
from kedge.engine.local.model.loading import checked_runner
from kedge.engine.local.model.replica import random_model, small_config
from kedge.engine.local.model.runner import ModelRunner
from kedge.engine.local.sequence import RequestSequence
from kedge.kv.segment import KVSegment
from kedge.reuse.costs import EngineCosts
from kedge.settings import AnchorSettings, PlannerConstants, PlannerSettings, TierSettings
from kedge.types import (
    AgentId,
    GenerateRequest,
    ReuseMode,
    RunId,
    SampleId,
    SamplingParams,
    Segment,
    TenantId,
    Tokens,
    WorkflowId,
)
from tests.engine.local.conftest import DEVICE, engine_of, tiny_model
from tests.engine.local.stepping import OPEN, Stepped
from tests.engine.local.test_engine import greedy
from tests.engine.local.test_engine import prompt as tokens

SETTINGS: dict[str, object] = {
    "anchors": AnchorSettings(**OPEN),
    "planner": PlannerConstants(by_cost=False, recompute_head=0, move="unlearned"),
}


def request(
    question: Tokens,
    hint: Tokens = (),
    reuse: ReuseMode = ReuseMode.TRANSLATE,
    agent: str = "solver",
    run: str = "run",
    **sampling: object,
) -> GenerateRequest:
    """An agent's prompt: a prefix of its own, the question, a prefix, a hint, and a last prefix."""
    size = {"solver": 20, "critic": 33}[agent]
    placeholder_text = {"base_context": tokens(1, 3), "placeholder_text": tokens(2, 6)}
    segments = [
        Segment(tokens(size, size), "p0"),
        Segment(question, "user_question", SampleId.parse("input_user_question@0"), **placeholder_text),
        Segment(tokens(7, 9), "p1"),
        Segment(hint, "condition_solver_current", SampleId.parse("condition_solver@0"), **placeholder_text),
        Segment(tokens(8, 5), "p2"),
    ]
    params = SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **sampling})
    kept = tuple(segment for segment in segments if segment.tokens)
    return GenerateRequest(kept, params, reuse, run=RunId(run), workflow=WorkflowId("test"), agent=AgentId(agent))


class Driver(Stepped):
    """An engine that serves one request after the other, so that a test can look at the KV of one that still runs."""

    def __init__(
        self, model: PreTrainedModel | None = None, runner: ModelRunner | None = None, **settings: object
    ) -> None:
        self.runner = runner or checked_runner((model or tiny_model("llama")).to(settings.get("device", "cpu")))
        super().__init__(EngineCosts, self.runner, **{**SETTINGS, **settings})

    def serve(self, request: GenerateRequest) -> tuple[RequestSequence, KVSegment]:  # type: ignore[override]
        """Serves a request to its end and learns from it; its prompt's KV as it was after the first token."""
        sequence = self.submit(request)
        self.until(lambda: sequence.first_token is not None or sequence.is_over)
        assert sequence.table is not None, "it has ended with an error"
        kv = self.core.parts.storage.read(sequence.table, 0, request.prompt_tokens)
        self.rest()
        self.learn()
        self.core.parts.cache.clear()  # so that an exact prefix never hides a translation
        return sequence, kv


def relative(a, b) -> float:  # noqa: ANN001
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_exact_repeat_of_an_anchor_reproduces_its_dense_kv(estimator: str) -> None:
    driver = Driver(anchors=AnchorSettings(**OPEN, estimator=estimator), device=DEVICE.type)
    asked = request(tokens(50, 30), tokens(51, 12))
    for seed in (60, 61):
        driver.serve(request(tokens(seed, 30), tokens(seed + 5, 12)))
    first, dense = driver.serve(asked)
    again, translated = driver.serve(replace(asked, request_id="again"))
    if first.plan.translates:  # with wide thresholds the two samples served it: learn it densely first
        pytest.fail("the first sight of a value must be prefilled densely here")
    assert again.plan.translates
    assert relative(translated.keys, dense.keys) < 1e-3
    assert relative(translated.values, dense.values) < 1e-3


@pytest.mark.parametrize(
    "room",
    [{}, {"kv_memory": "24 blocks", "tiers": TierSettings(host_memory="100 blocks", backup_hits=0)}],
    ids=["device", "tiers"],
)
def test_translated_blocks_never_reach_another_request(room: dict[str, object]) -> None:
    with engine_of(tiny_model("llama").to(DEVICE), **SETTINGS, **room) as engine:
        asked = [request(tokens(50 + i % 3, 40), tokens(70 + (i + i // 3) % 3, 20), run=f"run-{i}") for i in range(9)]
        translated = [_served(engine, item) for item in asked]
        assert translated[-1].receipt.translated > 0
        for item in asked[:3]:
            off = _served(engine, replace(item, reuse=ReuseMode.OFF, request_id=f"off-{item.request_id}"))
            exact = _served(engine, replace(item, reuse=ReuseMode.EXACT, request_id=f"exact-{item.request_id}"))
            assert exact.tokens == off.tokens


def _served(engine: LocalEngine, item: GenerateRequest):  # noqa: ANN202
    done = engine.submit(item).result(60)
    engine.wait_idle(60)
    return done


@pytest.mark.parametrize("size", [0, 1])
def test_tiny_placeholders(size: int) -> None:
    driver = Driver(planner=PlannerConstants(by_cost=False, recompute_head=2))
    for seed in (50, 51, 52, 52):
        last, _ = driver.serve(request(tokens(seed, 30), tokens(seed + 9, size)))
    assert last.plan.translates
    assert last.receipt().prompt_tokens == 20 + 30 + 9 + size + 5


def _twice(question: Tokens) -> GenerateRequest:
    once = request(question, question)
    twice = replace(once.segments[3], name="user_question", sample=SampleId.parse("input_user_question@0"))
    return replace(once, segments=(*once.segments[:3], twice, *once.segments[4:]))


def test_a_placeholder_used_twice_has_two_slots() -> None:
    driver = Driver()
    for seed in (50, 51, 50):
        again, _ = driver.serve(_twice(tokens(seed, 30)))
    assert again.plan.translates
    assert len(again.plan.translations) == 4
    assert driver.core.parts.stats()["anchors"]["sites"] == 2


def test_a_model_that_cannot_be_translated_is_served_exactly_with_the_reason() -> None:
    with engine_of(random_model(small_config(HunYuanDenseV1Config())), **SETTINGS) as engine:
        assert "rotated in none of the known ways" in str(engine.translation_refusal)
        done = [engine.submit(request(tokens(50, 30))).result(60) for _ in range(3)]
    assert [c.receipt.translated for c in done] == [0, 0, 0]
    assert done[-1].receipt.exact > 0
    assert "rotated in none of the known ways" in done[-1].receipt.misses[0].reason


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_keys_are_as_near_as_values_when_lengths_before_them_differ(estimator: str) -> None:
    """Offsets kept in a rotated frame are useless for another length: their K error is several times the V error."""
    settings = {**OPEN, "estimator": estimator, "min_anchors": 6}
    driver = Driver(anchors=AnchorSettings(**settings))
    for i in range(6):
        driver.serve(request(tokens(50 + i, 35 - 3 * i), tokens(80 + i, 24 - i), max_tokens=1))
    asked = request(tokens(70, 27), tokens(90, 18), max_tokens=1)
    driver.serve(request(tokens(70, 27), tokens(90, 18), agent="critic", max_tokens=1))  # leaves the base KV behind
    sequence, translated = driver.serve(asked)
    assert sequence.plan.translates
    _, dense = driver.serve(replace(asked, reuse=ReuseMode.OFF, request_id="dense"))
    hint = slice(20 + 27 + 9, 20 + 27 + 9 + 18)
    key_error = relative(translated.keys[1:, hint], dense.keys[1:, hint])
    value_error = relative(translated.values[1:, hint], dense.values[1:, hint])
    assert 0 < key_error < 1.3 * value_error


# before anchors exist -------------------------------------------------------------------------------------------------


def reading(answer: Tokens, question: Tokens, run: str) -> GenerateRequest:
    """The critic's prompt: its prefix, a question, a prefix, the answer of the solver in `run`, and a last prefix."""
    segments = (
        Segment(tokens(33, 33), "p0"),
        Segment(question, "user_question", SampleId.parse("input_user_question@0"), base_context=tokens(1, 3)),
        Segment(tokens(7, 9), "p1"),
        Segment(answer, "agent_solver_current", SampleId.parse("agent_solver@0")),
        Segment(tokens(8, 5), "p2"),
    )
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    return GenerateRequest(
        segments, params, ReuseMode.TRANSLATE, run=RunId(run), workflow=WorkflowId("test"), agent=AgentId("critic")
    )


def answered(driver: Driver, question: Tokens, run: str) -> Tokens:
    asked = replace(request(question, run=run, max_tokens=24), produces=SampleId.parse("agent_solver@0"))
    return tuple(driver.serve(asked)[0].tokens[asked.prompt_tokens :])


def test_a_new_teams_first_answer_is_moved_to_its_reader() -> None:
    """Its values are those of its decoding, its keys are rotated to their place, and everything else is computed."""
    driver = Driver(anchors=AnchorSettings(**{**OPEN, "min_anchors": 2}))
    answer = answered(driver, tokens(50, 12), "first")
    asked = reading(answer, tokens(50, 12), "first")
    base = driver.core.parts.learned[1].find(asked.run_key, asked.segments[3].sample, answer, ())
    sequence, kv = driver.serve(asked)
    assert base is not None and sequence.receipt().translated == len(answer) == 24
    moved = kv.slice(54, 78)
    assert relative(moved.keys, base.kv.keys) < 1e-5 and relative(moved.values, base.kv.values) < 1e-5
    reasons = {miss.segment: miss.reason for miss in sequence.receipt().misses}
    assert reasons["user_question"] == "no anchor of this agent yet" and "p2" in reasons


def in_context(asked: GenerateRequest) -> GenerateRequest:
    """The same request, with the solver's prompt as the base context of the question."""
    question = replace(asked.segments[1], base_context=tokens(20, 20), in_context=True)
    return replace(asked, segments=(asked.segments[0], question, *asked.segments[2:]))


def test_a_question_is_moved_from_the_first_prompt_that_reads_it() -> None:
    """Its values are those of that prompt, and nothing was computed for it besides."""
    driver = Driver(planner=PlannerSettings(by_cost=False))
    question = tokens(50, 30)
    _, first = driver.serve(in_context(request(question)))
    sequence, kv = driver.serve(in_context(request(question, agent="critic")))
    assert sequence.receipt().translated == len(question) + 9, "and the text behind it"
    assert sequence.receipt().computed == 33 + 5, "what is the agent's own"
    read, moved = first.slice(20, 59), kv.slice(33, 72)
    assert relative(moved.keys, read.keys) < 1e-5 and relative(moved.values, read.values) < 1e-5
    stats = driver.core.parts.learning.stats()
    assert stats["base_prefills_done"] == stats["observed"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_crowd_reads_questions_in_a_small_pool(seed: int) -> None:
    """Readers at once, some before the one in whose prompt the question's base KV is computed; some are cancelled, and
    some say that this prompt is longer than any may be, or ends otherwise.
    """
    rng = random.Random(seed)
    settings = {"planner": PlannerSettings(by_cost=False), "kv_memory": "40 blocks", "max_running": 8}
    model = tiny_model("llama")
    answers = {}

    def answer(asked: GenerateRequest) -> Tokens:
        if asked.tokens not in answers:
            answers[asked.tokens] = greedy(model, asked.tokens, 6)
        return answers[asked.tokens]

    crowd = []
    for at in range(32):
        asked = in_context(
            request(tokens(50 + at // 8, 30), agent=rng.choice(("solver", "critic")), run=f"run-{at // 8}")
        )
        if at % 8 in (3, 5):
            wrong = replace(asked.segments[1], base_context=tokens(at, 19 if at % 8 == 3 else 100_000))
            asked = replace(asked, segments=(asked.segments[0], wrong, *asked.segments[2:]))
        crowd.append((asked, answer(asked)))
    with engine_of(model, **settings) as engine:
        streams, expected = [], {}
        for at, (asked, wanted) in enumerate(crowd):
            exact = replace(asked, reuse=ReuseMode.EXACT, request_id=f"exact-{at}", tenant=TenantId("exact"))
            streams += [engine.submit(asked), engine.submit(exact)]
            expected[exact.request_id] = wanted
            if at % 8 == 6:
                engine.cancel(asked.request_id)
        done = [stream.result(60) for stream in streams]
        engine.wait_idle()
        engine.query(EngineParts.check_integrity)
        assert any(one.receipt.translated for one in done)
        exact_ones = [one for one in done if one.request_id in expected]
        assert [one.tokens for one in exact_ones] == [expected[one.request_id] for one in exact_ones]


def test_a_team_learns_from_what_its_readers_compute() -> None:
    """No prompt is dense for it: what the first two left translates the third one's question and the template behind
    both values, and the answer is moved as before.
    """
    driver = Driver(anchors=AnchorSettings(**{**OPEN, "min_anchors": 2}))
    translated = []
    for at in range(3):
        run, question = f"run-{at}", tokens(50 + at, 12)
        asked = reading(answered(driver, question, run), question, run)
        base = driver.core.parts.learned[1].find(asked.run_key, asked.segments[3].sample, asked.segments[3].tokens, ())
        sequence, kv = driver.serve(asked)
        translated.append(sequence.receipt().translated)
        moved = kv.slice(54, 78)
        assert relative(moved.keys, base.kv.keys) < 1e-5 and relative(moved.values, base.kv.values) < 1e-5
    assert translated == [24, 24, 24 + 12 + 9 + 4]
