"""Snapshots of recurrent states: prompts go on where others were copied, and answer as Transformers does."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.engine.local.model.loading import checked_runner
from kedge.engine.local.model.runner import ModelRunner
from kedge.engine.local.sequence import RequestSequence
from kedge.engine.local.state_snapshots import StateSnapshots
from kedge.errors import RequestError
from kedge.settings import TierSettings
from kedge.types import GenerateRequest, Receipt, ReuseMode, SamplingParams, Segment, TenantId, Tokens, new_request_id
from tests.engine.local.conftest import engine_of
from tests.engine.local.model.test_architectures import HYBRID, ON_PUSH, model_of
from tests.engine.local.stepping import Stepped
from tests.engine.local.test_engine import greedy, prompt, request
from tests.engine.local.test_translation import request as translatable
from tests.engine.local.test_translation import tokens
from tests.marks import on_push

NAME = "Qwen3-Next, linear attention"
BLOCK = 16
ONE = 8192
"""More than a snapshot of 100 tokens takes, and less than two"""


@cache
def runner() -> ModelRunner:
    return checked_runner(model_of(NAME))


@cache
def expected(tokens: Tokens, count: int) -> Tokens:
    return greedy(runner().model, tokens, count)


def stepped(**changes: object) -> Stepped:
    return Stepped(model=runner(), **changes)


def serve(engine: Stepped, asked: GenerateRequest) -> Receipt:
    """Serve a request to its end, compare its answer, and return its receipt."""
    sequence = engine.submit(asked)
    engine.rest()
    require_right(sequence)
    return sequence.receipt()


def require_right(sequence: RequestSequence) -> None:
    asked = sequence.request
    assert tuple(sequence.response) == expected(asked.tokens, asked.sampling.max_tokens)


def snapshots(engine: Stepped) -> StateSnapshots:
    return engine.core.parts.snapshots


def stats(engine: Stepped) -> dict[str, int]:
    found: Any = engine.core.parts.stats()["states"]
    return found


def ask(tokens: Tokens, count: int = 4, reuse: ReuseMode = ReuseMode.EXACT) -> GenerateRequest:
    return request(tokens, reuse, max_tokens=count)


# where prompts go on --------------------------------------------------------------------------------------------------


def test_a_prompt_that_is_asked_again_goes_on_at_its_last_full_block() -> None:
    engine = stepped()
    assert [serve(engine, ask(prompt(1, size))).exact for size in (5, 16, 17, 70)] == [0, 0, 0, 16]
    assert [serve(engine, ask(prompt(1, size))).exact for size in (5, 16, 17, 70)] == [0, 0, 16, 64]


@pytest.mark.parametrize("answer", [1, 2, 9, 60])
def test_the_next_turn_goes_on_where_the_last_one_ended(answer: int) -> None:
    engine, first = stepped(), prompt(1, 70)
    serve(engine, ask(first, answer))
    history = first + expected(first, answer)
    computed = len(history) - 1  # the last token of an answer is drawn, and not computed
    assert serve(engine, ask(history + prompt(2, 20))).exact == computed // BLOCK * BLOCK


def test_the_third_prompt_that_begins_alike_goes_on_where_the_second_parted() -> None:
    engine, common = stepped(), prompt(1, 100)
    receipts = [serve(engine, ask(common + prompt(seed, 60))) for seed in (2, 3, 4)]
    assert [one.exact for one in receipts] == [0, 0, 96]


@pytest.mark.parametrize("is_hint", [True, False])
def test_the_second_prompt_goes_on_at_the_end_of_the_fixed_one(is_hint: bool) -> None:
    engine, fixed = stepped(), prompt(1, 50)

    def call(seed: int) -> GenerateRequest:
        asked = replace(ask(fixed + prompt(seed, 60)), agent="writer")
        if is_hint:
            return replace(asked, fixed=len(fixed))
        return replace(asked, segments=(Segment(fixed, "p0"), Segment(prompt(seed, 60), "question")))

    assert [serve(engine, call(seed)).exact for seed in (2, 3)] == [0, 48]


def test_a_prompt_without_reuse_leaves_nothing_and_takes_nothing() -> None:
    engine = stepped()
    serve(engine, ask(prompt(1, 70), reuse=ReuseMode.OFF))
    assert stats(engine)["count"] == 0
    serve(engine, ask(prompt(1, 70)))
    assert serve(engine, ask(prompt(1, 70), reuse=ReuseMode.OFF)).exact == 0


def test_tenants_do_not_see_each_others() -> None:
    engine, asked = stepped(), ask(prompt(1, 70))
    serve(engine, asked)
    other = replace(asked, tenant=TenantId("other"), request_id="other")
    assert serve(engine, other).exact == 0
    assert serve(engine, replace(other, request_id="again")).exact == 64


def test_translation_is_refused_with_the_reason() -> None:
    engine = stepped()
    for seed in (60, 61, 60):
        asked = translatable(tokens(seed, 30), tokens(seed + 5, 12))
        receipt = serve(engine, replace(asked, request_id=new_request_id()))
        assert receipt.translated == 0
        assert any("keep one state of all tokens before" in miss.reason for miss in receipt.misses)
    assert receipt.exact > 48


def test_what_is_expected_is_not_prepared() -> None:
    engine = stepped()
    asked = replace(ask(prompt(1, 70)), agent="writer")
    engine.core.prepare(asked)
    engine.rest()
    assert engine.stats("preassembly")["begun"] == 0
    serve(engine, asked)


# what is kept ---------------------------------------------------------------------------------------------------------


def test_they_stay_within_their_memory_and_the_least_recently_used_goes() -> None:
    engine = stepped(state_memory=4 * ONE)
    for seed in range(8):
        serve(engine, ask(prompt(seed, 70)))
        assert stats(engine)["nbytes"] <= 4 * ONE
    assert stats(engine)["evicted"] > 0
    again = [serve(engine, ask(prompt(seed, 70))).exact for seed in (7, 0)]
    assert again == [64, 0]


def test_the_first_to_go_is_one_without_kv() -> None:
    engine = stepped(state_memory=4 * ONE, num_blocks=24)
    serve(engine, ask(prompt(1, 300)))
    serve(engine, ask(prompt(2, 300)))  # takes the blocks of the first
    kept = snapshots(engine)
    assert [kept._has_kv(one) for one in kept._kept.values()] == [False, True]
    kept._kept.move_to_end(next(iter(kept._kept)))
    assert kept._victim() == list(kept._kept)[1]


def test_one_that_does_not_fit_is_counted_and_not_kept() -> None:
    engine = stepped(state_memory=100)
    assert [serve(engine, ask(prompt(1, 70))).exact for _ in range(2)] == [0, 0]
    assert (stats(engine)["refused"], stats(engine)["count"], stats(engine)["nbytes"]) == (2, 0, 0)


def test_they_are_of_no_use_without_their_kv() -> None:
    engine = stepped(num_blocks=24)
    assert [serve(engine, ask(prompt(seed, 300))).exact for seed in (1, 2, 1)] == [0, 0, 0]


def test_kv_that_comes_back_from_the_host_is_used_up_to_the_last_one() -> None:
    tiers = TierSettings(host_blocks=100, backup_hits=0, policy="lru")
    asked = [prompt(seed, 300) for seed in (1, 2)]
    with engine_of(model_of(NAME), num_blocks=24, tiers=tiers) as engine:
        for reused in (0, 288):
            for one in asked:
                done = engine.submit(ask(one)).result(60)
                engine.wait_idle(60)
                assert (done.tokens, done.receipt.exact) == (expected(one, 4), reused)


def test_clearing_the_cache_forgets_them_and_running_requests_go_on() -> None:
    engine = stepped()
    sequence = engine.submit(ask(prompt(1, 70), 40))
    engine.until(lambda: len(sequence.response) > 10)
    engine.core.clear()
    assert stats(engine)["count"] == 0
    engine.rest()
    require_right(sequence)


def test_the_states_of_a_sequence_go_with_it() -> None:
    engine = stepped()
    cancelled, served = engine.submit(ask(prompt(1, 70), 40)), engine.submit(ask(prompt(2, 70), 40))
    engine.until(lambda: len(served.response) > 30)
    assert served.states is not None and served.boundary is not None
    engine.core.requests.cancel(cancelled.request.request_id)
    engine.rest()
    assert [one.states or one.boundary for one in (cancelled, served)] == [None, None]
    require_right(served)


def test_a_preempted_request_goes_on_from_the_last_one() -> None:
    engine = stepped(num_blocks=20)
    mine = [engine.submit(ask(prompt(seed, 70), 50)) for seed in (1, 2)]
    engine.until(lambda: all(len(one.response) > 10 for one in mine))
    other = engine.submit(replace(ask(prompt(3, 70), 50), tenant=TenantId("other")))
    engine.until(lambda: engine.core.scheduler.preempted)
    engine.rest()
    for sequence in (*mine, other):
        require_right(sequence)
    assert stats(engine)["hits"] == 1


# many at once ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reuse", [ReuseMode.OFF, ReuseMode.EXACT])
@pytest.mark.parametrize("name", on_push(HYBRID, ON_PUSH))
def test_32_requests_at_once_in_a_full_pool_answer_as_transformers_does(name: str, reuse: ReuseMode) -> None:
    model = model_of(name)
    stems = [prompt(seed, size) for seed, size in ((1, 64), (2, 33), (3, 5), (4, 100))]
    prompts = [stems[n % 4] + prompt(100 + n % 8, n % 8) for n in range(32)]
    answers = {one: greedy(model, one, 24) for one in dict.fromkeys(prompts)}
    with engine_of(model, max_batch_tokens=128, max_running=32, num_blocks=80) as engine:
        streams = [engine.submit(ask(one, 24, reuse)) for one in prompts]
        aborted = [engine.submit(ask(one, 400, reuse)) for one in prompts[:8]]
        with pytest.raises(RequestError):
            engine.submit(ask((1, 2**40), reuse=reuse))
        assert all(engine.cancel(one.request_id) for one in aborted)
        assert [stream.result(300).tokens for stream in streams] == [answers[one] for one in prompts]
        engine.wait_idle(60)
        assert engine.inspect()["cache"]["leased_blocks"] == 0


STEMS = [prompt(seed, size) for seed, size in ((1, 20), (1, 48), (2, 64), (3, 7))]
ASKED = [stem + prompt(10 + seed, 5 * seed) for stem in STEMS for seed in range(3)]
ACTIONS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, len(ASKED) - 1), st.sampled_from([1, 6, 20])),
    st.tuples(st.just("step"), st.integers(1, 20), st.just(0)),
    st.tuples(st.just("cancel"), st.integers(0, 50), st.just(0)),
    st.tuples(st.just("clear"), st.just(0), st.just(0)),
)


@given(st.lists(ACTIONS, max_size=25), st.sampled_from([2 * ONE, 1 << 20]), st.sampled_from([8, 16, 64]))
@settings(max_examples=40, deadline=None)
def test_whatever_happens_answers_are_right_and_the_books_are(
    actions: list[tuple[str, int, int]], memory: int, num_blocks: int
) -> None:
    engine = stepped(num_blocks=num_blocks, max_batch_tokens=32, state_memory=memory)
    asked: list[RequestSequence] = []
    for what, number, count in actions:
        if what == "ask":
            asked.append(engine.submit(ask(ASKED[number], count)))
        elif what == "cancel" and asked:
            engine.core.requests.cancel(asked[number % len(asked)].request.request_id)
        elif what == "clear":
            engine.core.clear()
        for _ in range(number if what == "step" else 0):
            engine.step()
    engine.rest()
    for sequence in asked:
        if len(sequence.response) == sequence.request.sampling.max_tokens:
            require_right(sequence)
    kept = snapshots(engine)
    assert kept.stats().nbytes == sum(one.nbytes for one in kept._kept.values()) <= memory
    assert all(one.states is None for one in asked)


# the model ------------------------------------------------------------------------------------------------------------


def test_a_model_with_recurrent_layers_runs_by_itself_as_before() -> None:
    plain, wrapped = model_of(NAME), runner().model
    tokens = torch.tensor([prompt(1, 40)])
    with torch.no_grad():
        own = plain(input_ids=tokens, use_cache=False).logits
        wrapped.set_attn_implementation("eager")
        again = wrapped(input_ids=tokens, use_cache=False).logits
        wrapped.set_attn_implementation("kedge")
    torch.testing.assert_close(own, again, atol=1e-4, rtol=1e-4)


def test_sampling_parameters_do_not_change_where_a_prompt_goes_on() -> None:
    engine = stepped()
    asked = replace(ask(prompt(1, 70)), sampling=SamplingParams(max_tokens=9, temperature=1.0, seed=1, ignore_eos=True))
    first, again = (engine.submit(replace(asked, request_id=f"r{n}")) for n in range(2))
    engine.rest()
    last = engine.submit(replace(asked, request_id="last"))
    engine.rest()
    assert first.response == again.response == last.response
    assert last.receipt().exact == 64
