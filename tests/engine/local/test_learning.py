"""What is learned from, what has to give way, and that neither costs a block, a run or a request anything."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kedge.engine.local import learning as local_learning
from kedge.engine.local.model.loading import checked_runner
from kedge.engine.local.sequence import RequestSequence
from kedge.kv.segment import KVSegment
from kedge.settings import AnchorSettings, PlannerConstants
from kedge.types import GenerateRequest, ReuseMode, SampleId
from tests.engine.local.conftest import tiny_model
from tests.engine.local.stepping import ANSWER, QUESTION, KnownCosts, Stepped, prompt_of
from tests.engine.local.test_translation import OPEN, tokens


def reader(seed: int, agent: str = "reader", **more: Any) -> GenerateRequest:
    """A call about values that nobody has seen yet."""
    return prompt_of(agent, tokens(2 * seed, QUESTION), tokens(2 * seed + 1, ANSWER), **more)


def engine_of(budget: float = 0.0, **settings: Any) -> Stepped:
    """An engine that learns while requests run as far as the budget lets it."""
    engine = Stepped(**{"kv_memory": "512 blocks", **settings})
    engine.core.parts.learning.budget._share = budget
    return engine


def learning(engine: Stepped) -> dict[str, Any]:
    return engine.stats("learning")


def observed(engine: Stepped) -> int:
    """Values that were learned from."""
    return engine.stats("anchors")["observed"]


def all_is_given_back(engine: Stepped) -> None:
    engine.rest()
    engine.learn()
    assert (engine.leased, learning(engine)["pending"], learning(engine)["base_prefills"]) == (0, 0, 0)


# bounds ---------------------------------------------------------------------------------------------------------------


def test_only_so_many_base_prefills_are_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_learning, "MAX_PENDING", 4)
    engine = engine_of()
    sequences = [engine.submit(reader(seed)) for seed in range(12)]
    while not all(one.is_over for one in sequences):
        engine.step()
        assert learning(engine)["base_prefills"] <= 4
    assert learning(engine)["base_prefills_dropped"] > 0
    all_is_given_back(engine)


def test_nothing_grows_with_the_number_of_questions() -> None:
    """New and random ones, so that hardly any is shareable and all are learned from."""
    anchors = AnchorSettings(capacity=3, max_base_bytes=1 << 20)
    planner = PlannerConstants(by_cost=False, move="never")  # so that all pools fill
    engine, looks = engine_of(kv_memory="256 blocks", anchors=anchors, planner=planner), []
    for number in range(60):
        writer = engine.serve(written(1000 + 2 * number, f"run-{number}"))
        question = writer.request.segments[1].tokens
        engine.serve(prompt_of("reader", question, tuple(writer.response), run=f"run-{number}"))
        engine.core.end_run(writer.request.run_key)
        looks.append(engine.stats("anchors")["nbytes"])
    # An anchor that only some of its readers were learned from holds less, so that bytes may shrink.
    assert all(0 < nbytes <= 1.02 * looks[9] for nbytes in looks[10:])
    assert engine.stats("base_kv")["nbytes"] <= 1 << 20
    assert (engine.stats("anchors")["anchors"], engine.leased) == (2 * 3, 0)


# admission goes first -------------------------------------------------------------------------------------------------


def test_a_request_takes_the_blocks_of_what_waits_to_be_learned_from_the_oldest_first() -> None:
    engine = engine_of(kv_memory="24 blocks")
    kept = [engine.submit(reader(seed)) for seed in range(3)]
    engine.rest()
    assert learning(engine)["pending"] == 3
    engine.submit(prompt_of("writer", tokens(90, 60), reuse=ReuseMode.OFF))
    engine.step()
    assert (learning(engine)["pending"], learning(engine)["reclaimed"]) == (2, 1)
    assert list(engine.core.parts.learning.backlog) == kept[1:]
    all_is_given_back(engine)


def test_a_request_takes_the_blocks_of_a_base_prefill() -> None:
    engine = engine_of(kv_memory="16 blocks", max_batch_tokens=16)
    first = engine.submit(prompt_of("reader", tokens(1, 100), max_tokens=1))
    engine.until(lambda: first.is_over and any(job.admitted for job in engine.core.scheduler.jobs))
    large = engine.submit(prompt_of("writer", tokens(90, 190), reuse=ReuseMode.OFF))
    engine.step()
    assert large.admitted
    assert learning(engine)["base_prefills_dropped"] == 1
    engine.rest()
    assert len(large.response) == 6
    all_is_given_back(engine)


@pytest.mark.parametrize("budget", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_blocks", [8, 16, 40])
def test_on_a_small_pool_all_requests_end_and_every_block_comes_back(num_blocks: int, budget: float) -> None:
    """The books are checked after every step."""
    engine = engine_of(budget, kv_memory=f"{num_blocks} blocks", max_batch_tokens=48, max_running=6)
    sequences = []
    for seed in range(30):
        mode = (ReuseMode.TRANSLATE, ReuseMode.TRANSLATE, ReuseMode.EXACT)[seed % 3]
        request = reader(seed // 2, f"agent-{seed % 3}", reuse=mode, run=f"run-{seed // 4}")
        sequences.append(engine.submit(replace(request, tenant=f"tenant-{seed % 2}")))
        engine.step()
    engine.rest()
    assert [len(one.response) for one in sequences] == [6] * 30
    all_is_given_back(engine)


# runs -----------------------------------------------------------------------------------------------------------------


def written(question: int = 1, run: str = "run", **more: Any) -> GenerateRequest:
    """A call whose answer leaves its KV to its run."""
    return prompt_of("writer", tokens(question, QUESTION), run=run, produces="agent_writer@0", **more)


def left(engine: Stepped, writer: RequestSequence) -> KVSegment | None:
    """Base KV that an answer has left for those that read it."""
    answer = SampleId.parse("agent_writer@0")
    found = engine.core.parts.bases.find(writer.request.run_key, answer, tuple(writer.response), ())
    return found and found.kv


def test_a_run_is_forgotten_once_nothing_of_it_is_left_to_be_learned_from() -> None:
    engine = engine_of()
    first, second = (engine.submit(written(number, run)) for number, run in enumerate(("first", "second"), 1))
    engine.rest()
    engine.core.end_run(first.request.run_key)
    assert left(engine, first), "it is still to be learned from"
    while learning(engine)["pending"] == 2:
        engine.core.parts.learning.backlog.step()
    assert left(engine, second) and not left(engine, first), "whoever else is pending"
    engine.learn()
    assert left(engine, second), "its run goes on"
    engine.core.end_run(second.request.run_key)
    assert not left(engine, second)
    assert not engine.core.parts.learning.backlog and not engine.core.parts.learning.backlog._ended


@pytest.mark.parametrize("reuse", ReuseMode)
@pytest.mark.parametrize("ends", ["length", "stop"])
def test_an_answer_leaves_the_kv_of_its_decoding_where_anything_is_translated(ends: str, reuse: ReuseMode) -> None:
    """And takes no pass more: of one that does not end by itself, the last token has none."""
    asked, model = written(reuse=reuse, max_tokens=8, ignore_eos=ends == "length"), tiny_model("llama")
    answer = Stepped().serve(written(max_tokens=8)).response
    if ends == "stop":
        assert answer[4] not in answer[:4]
        model.generation_config.eos_token_id, answer = answer[4], answer[:4]
    engine = Stepped(model=checked_runner(model))
    done = engine.serve(asked)
    assert (done.finish, done.response) == (ends, answer)
    is_read = reuse is ReuseMode.TRANSLATE
    passes = sum(any(item.sequence is done for item in work) for work in engine.passes)
    assert passes == (5 if ends == "stop" else 8)
    kv = left(engine, done)
    assert (kv is not None) == is_read
    if kv:
        with torch.inference_mode():
            whole = tiny_model("llama")(torch.tensor([asked.tokens + tuple(answer)])).past_key_values
        expected = torch.stack([one.values[0, :, asked.prompt_tokens :].transpose(0, 1) for one in whole.layers])
        known = len(answer) - (ends == "length")
        torch.testing.assert_close(kv.values, expected[:, :known], rtol=1e-4, atol=1e-5)


# requests that are taken out ------------------------------------------------------------------------------------------


def running(engine: Stepped, seed: int, **more: Any) -> RequestSequence:
    """A call that has its first token and is going to be learned from."""
    sequence = engine.submit(reader(seed, max_tokens=40, **more))
    engine.until(lambda: sequence.first_token)
    assert learning(engine)["pending"] == 1
    return sequence


def test_a_cancelled_request_is_not_learned_from() -> None:
    engine = engine_of()
    sequence = running(engine, 1)
    assert engine.core.requests.cancel(sequence.request.request_id)
    assert learning(engine)["pending"] == 0
    all_is_given_back(engine)
    assert observed(engine) == 0


def test_a_preempted_request_is_not_learned_from() -> None:
    engine = engine_of(kv_memory="24 blocks")
    oldest = engine.submit(reader(1, max_tokens=40, reuse=ReuseMode.EXACT))
    youngest = running(engine, 2)
    stranger = replace(reader(3, reuse=ReuseMode.EXACT), tenant="stranger")
    engine.submit(stranger)
    engine.step()
    assert list(engine.core.scheduler.preempted) == [youngest]
    assert learning(engine)["pending"] == 0
    all_is_given_back(engine)
    assert [len(one.response) for one in (oldest, youngest)] == [40, 40]
    assert observed(engine) == 0


# under load -----------------------------------------------------------------------------------------------------------


def taught_while_busy(engine: Stepped) -> int:
    """Values that are learned from while another request reads its long prompt, chunk by chunk."""
    engine.serve(reader(1))
    engine.core.parts.cache.clear()
    before = observed(engine)
    long = prompt_of("writer", tokens(9, 800), reuse=ReuseMode.OFF, max_tokens=1)
    sequences = [engine.submit(reader(2, max_tokens=1)), engine.submit(long)]
    engine.until(lambda: all(one.is_over for one in sequences))
    return observed(engine) - before


def test_requests_that_wait_keep_the_engine_from_learning_only_without_a_budget() -> None:
    assert taught_while_busy(engine_of(1.0, max_batch_tokens=96)) > 0
    engine = engine_of(0.0, max_batch_tokens=96)
    assert taught_while_busy(engine) == 0
    assert learning(engine)["pending"] == 1
    all_is_given_back(engine)
    assert observed(engine) > 0


# first readers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seen", "is_translated"), [(3, False), (4, True)])
def test_the_first_reader_translates_a_value_once_its_agents_estimates_are_calibrated(
    seen: int, is_translated: bool
) -> None:
    """What it gets wrong all others read, so that the few values that make a pool shareable are not enough."""
    engine = engine_of(0.5, anchors=AnchorSettings(**{**OPEN, "min_anchors": 2}))
    for seed in range(seen):
        engine.serve(reader(seed, run=f"run-{seed}"))
        engine.core.parts.cache.clear()
    other = engine.submit(prompt_of("writer", tokens(99, 40), reuse=ReuseMode.OFF, max_tokens=30))
    engine.until(lambda: other.first_token)
    first = engine.submit(reader(50, run="new"))
    engine.rest()
    assert bool(first.receipt().translated) == is_translated
    all_is_given_back(engine)


# what costs less to compute -------------------------------------------------------------------------------------------


class Costly(KnownCosts):
    """Of a machine on which translating takes as long as computing 15 tokens, and no more for longer values."""

    translations = (15e-4, 0.0)


def test_what_costs_less_to_compute_is_computed_and_nothing_is_done_for_it() -> None:
    """Neither the answer (24 tokens) saves twice that, nor the base KV of the question (40) for two readers."""
    engine = Stepped(Costly, planner=PlannerConstants(min_translated=0.0))
    receipt = engine.serve(reader(2)).receipt()
    reasons = {miss.segment: miss.reason for miss in receipt.misses}
    assert reasons["agent_writer_current"] == "translating it would save too little time"
    assert not engine.core.parts.anchors.pools
    assert learning(engine)["base_prefills_done"] == 1, "the template's"
