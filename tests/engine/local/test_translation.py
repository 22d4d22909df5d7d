"""Translation inside the engine: what is written, what is recorded, and what is never shared."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from transformers import HunYuanDenseV1Config, PreTrainedModel

from kedge.anchors.estimators import ESTIMATORS
from kedge.engine.local.engine import LocalEngine
from kedge.engine.local.model.loading import checked_runner
from kedge.engine.local.model.replica import random_model, small_config
from kedge.engine.local.model.runner import ModelRunner
from kedge.engine.local.sequence import RequestSequence
from kedge.kv.segment import KVSegment
from kedge.reuse.costs import EngineCosts
from kedge.settings import AnchorSettings, DiscoveryMode, PlannerConstants, PlannerSettings, TierSettings
from kedge.types import Completion, GenerateRequest, Namespace, ReuseMode, SampleId, SamplingParams, Segment, Tokens
from tests.discovery.teams import joined, judge, solver, words
from tests.engine.local.conftest import DEVICE, at_rest, engine_of, served, tiny_model
from tests.engine.local.stepping import OPEN, Stepped
from tests.engine.local.test_engine import greedy
from tests.engine.local.test_engine import prompt as tokens
from tests.engine.local.test_engine import request as plain_request

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
    return GenerateRequest(kept, params, reuse, run=run, workflow="test", agent=agent)


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


@pytest.mark.parametrize(
    "room",
    [{}, {"kv_memory": "24 blocks", "tiers": TierSettings(host_memory="100 blocks", backup_hits=0)}],
    ids=["device", "tiers"],
)
def test_translated_blocks_never_reach_another_request(room: dict[str, object]) -> None:
    with engine_of(tiny_model("llama").to(DEVICE), **SETTINGS, **room) as engine:
        asked = [request(tokens(50 + i % 3, 40), tokens(70 + (i + i // 3) % 3, 20), run=f"run-{i}") for i in range(9)]
        translated = [served(engine, item) for item in asked]
        assert translated[-1].receipt.translated > 0
        for item in asked[:3]:
            off = served(engine, replace(item, reuse=ReuseMode.OFF, request_id=f"off-{item.request_id}"))
            exact = served(engine, replace(item, reuse=ReuseMode.EXACT, request_id=f"exact-{item.request_id}"))
            assert exact.tokens == off.tokens


@pytest.mark.parametrize("size", [0, 1])
def test_tiny_placeholders(size: int) -> None:
    driver = Driver(planner=PlannerConstants(by_cost=False, recompute_head=2))
    for seed in (50, 51, 52, 52):
        last, _ = driver.serve(request(tokens(seed, 30), tokens(seed + 9, size)))
    assert last.plan.translates
    assert last.receipt().prompt_tokens == 20 + 30 + 9 + size + 5


def test_a_placeholder_used_twice_has_two_slots() -> None:
    driver = Driver()
    for seed in (50, 51, 50):
        once = request(tokens(seed, 30), tokens(seed, 30))
        twice = replace(once.segments[3], name="user_question", sample=SampleId.parse("input_user_question@0"))
        again, _ = driver.serve(replace(once, segments=(*once.segments[:3], twice, *once.segments[4:])))
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
    asked = request(tokens(70, 27), tokens(90, 18))
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
    """The critic's prompt, with the answer of the solver in `run` in place of a hint."""
    asked = request(question, answer, agent="critic", run=run, max_tokens=2)
    said = Segment(answer, "agent_solver_current", SampleId.parse("agent_solver@0"))
    return replace(asked, segments=(*asked.segments[:3], said, asked.segments[4]))


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
            exact = replace(asked, reuse=ReuseMode.EXACT, request_id=f"exact-{at}", tenant="exact")
            streams += [engine.submit(asked), engine.submit(exact)]
            expected[exact.request_id] = wanted
            if at % 8 == 6:
                engine.cancel(asked.request_id)
        done = [stream.result(60) for stream in streams]
        at_rest(engine)
        assert any(one.receipt.translated for one in done)
        exact_ones = [one for one in done if one.request_id in expected]
        assert [one.tokens for one in exact_ones] == [expected[one.request_id] for one in exact_ones]


def test_a_new_teams_answers_are_moved_and_it_learns_from_what_its_readers_compute() -> None:
    """An answer's values are those of its decoding, its keys are rotated to their place; the token drawn last has none.
    No prompt is dense to be learned from: what the first two left translates the third one's question and the template
    behind both values.
    """
    driver = Driver(anchors=AnchorSettings(**{**OPEN, "min_anchors": 2}))
    translated = []
    for at in range(3):
        run, question = f"run-{at}", tokens(50 + at, 12)
        solving = replace(request(question, run=run, max_tokens=24), produces=SampleId.parse("agent_solver@0"))
        asked = reading(tuple(driver.serve(solving)[0].response), question, run)
        base = driver.core.parts.bases.find(asked.run_key, asked.segments[3].sample, asked.segments[3].tokens, ())
        sequence, kv = driver.serve(asked)
        translated.append(sequence.receipt().translated)
        moved = kv.slice(54, 77)
        assert relative(moved.keys, base.kv.keys) < 1e-5 and relative(moved.values, base.kv.values) < 1e-5
        reasons = {miss.segment: miss.reason for miss in sequence.receipt().misses}
        assert at or (reasons["user_question"] == "no anchor of this agent yet" and "p2" in reasons)
    assert translated == [23, 23, 23 + 12 + 9 + 4]


# what is told of it ---------------------------------------------------------------------------------------------------

ACME, OTHER = Namespace("acme"), Namespace("other")


def of_tenant(space: Namespace, seed: int, reuse: ReuseMode = ReuseMode.TRANSLATE) -> GenerateRequest:
    return replace(request(tokens(seed, 24), reuse=reuse, run=f"run-{seed}"), tenant=space.tenant)


def test_prompts_are_told_by_tenant_and_by_full_blocks() -> None:
    with engine_of(tiny_model("llama"), block_size=16) as engine:
        asked = of_tenant(ACME, 3, ReuseMode.EXACT)
        served(engine, asked)
        held = engine.inspect_tenants(
            lambda space: space == ACME,
            [(ACME, asked.tokens), (ACME, asked.tokens[:40]), (OTHER, asked.tokens), (ACME, tokens(9, 40))],
        )
    assert held["prompts"] == [{"device": size, "host": 0} for size in (48, 32, 0, 0)]
    assert held["pools"] == []


def test_pools_are_told_to_whom_they_belong() -> None:
    with engine_of(tiny_model("llama"), **SETTINGS) as engine:
        for space, seed in ((ACME, 3), (ACME, 4), (ACME, 5), (OTHER, 6)):
            served(engine, of_tenant(space, seed))
        mine, theirs, nobodys = (
            engine.inspect_tenants(lambda space, name=name: space == name, [])["pools"]
            for name in (ACME, OTHER, Namespace("acm"))
        )
        everything = engine.inspect()["anchors"]
    (pool,), (foreign,) = mine, theirs
    assert (pool["workflow"], pool["placeholder"], pool["sites"]) == ("test", "user_question", 1)
    assert pool["anchors"] + foreign["anchors"] == everything["anchors"]
    assert pool["nbytes"] + foreign["nbytes"] == everything["nbytes"]
    assert (pool["uses"] > 0) == (everything["used"] > 0)
    assert nobodys == []
    assert "tenant" not in pool


# plain requests: what agents share is found and translated, without a word of the client ------------------------------

VOCABULARY, ANSWER = 256, 24
"""The model's tokens, and those of an answer."""


def discovering(mode: DiscoveryMode) -> LocalEngine:
    anchors, planner = AnchorSettings(**{**OPEN, "min_anchors": 2}), PlannerSettings(by_cost=False)
    return engine_of(tiny_model("llama"), anchors=anchors, planner=planner, discovery={"mode": mode})


def plain(tokens: Tokens, tenant: str = "default") -> GenerateRequest:
    return replace(plain_request(tokens, max_tokens=ANSWER), tenant=tenant, is_plain=True)


def team(
    engine: LocalEngine, number: int, tenant: str = "default", read: Callable[[Tokens], Tokens] = tuple
) -> tuple[Completion, Completion]:
    """Let a team answer a question; what the judge has of the solver's answer is what `read` makes of it."""
    question = words(("q", number), 60, VOCABULARY)
    solved = engine.submit(plain(solver(question, vocab=VOCABULARY), tenant)).result()
    answer = read(solved.tokens)
    return solved, engine.submit(plain(judge(question, answer, vocab=VOCABULARY), tenant)).result()


def behind_space(answer: Tokens) -> Tokens:
    return joined(answer, VOCABULARY)


def behind_reasoning(answer: Tokens) -> Tokens:
    return answer[6:]


@pytest.mark.parametrize(
    ("read", "size"), [(tuple, ANSWER), (behind_space, ANSWER - 1), (behind_reasoning, ANSWER - 6)]
)
def test_shared_text_is_translated_once_a_team_is_known(read: Callable[[Tokens], Tokens], size: int) -> None:
    with discovering(DiscoveryMode.TRANSLATE) as found:
        for number in range(10):
            found.wait_idle()
            judged = team(found, number, read=read)[1]
        assert judged.receipt.translated >= 60 + size - 1
        assert judged.receipt.mode is ReuseMode.TRANSLATE
        stranger = team(found, 3, tenant="other")[1]
        assert stranger.receipt.translated == 0
        figures: Any = found.inspect()
        assert figures["learning"]["base_prefills_done"] == 1, "that of the judge's template: answers bring their own"
        figures = figures["discovery"]
        assert figures["shared_tokens"] > 0 and figures["failures"] == 0
        assert figures["translated_tokens"] >= 60 + size and figures["exact_tokens"] >= 16


@pytest.mark.parametrize("clients", [32])
def test_teams_at_once_with_aborts_are_served_and_nothing_is_lost(clients: int) -> None:
    with discovering(DiscoveryMode.TRANSLATE) as found:

        def client(number: int) -> int:
            if number % 5 == 4:
                stream = found.submit(plain(solver(words(("q", number), 60, VOCABULARY), vocab=VOCABULARY)))
                return int(found.cancel(stream.request_id))
            return sum(len(one.tokens) for one in team(found, number))

        with ThreadPoolExecutor(clients) as pool:
            answered = list(pool.map(client, range(2 * clients)))
        assert all(one == 2 * ANSWER for number, one in enumerate(answered) if number % 5 != 4)
        at_rest(found)
        figures: Any = found.inspect()["discovery"]
        assert figures["failures"] == 0
