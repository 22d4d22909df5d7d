"""What is learned from, what has to give way, and that neither costs a block, a run or a request anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kedge.anchors.anchor import PoolKey
from kedge.engine.local import learning as local_learning
from kedge.engine.local.sequence import RequestSequence
from kedge.settings import AnchorSettings, PlannerConstants
from kedge.types import GenerateRequest, ReuseMode, RunId, RunKey, SampleId, TenantId, WorkflowId
from tests.engine.local.stage import ANSWER, QUESTION, SPACE, prompt_of
from tests.engine.local.stepping import KnownCosts, Stepped
from tests.engine.local.test_translation import OPEN, tokens

PLACEHOLDERS = ("user_question", "agent_writer_current")


def reader(seed: int, agent: str = "reader", **more: Any) -> GenerateRequest:
    """A call about values that nobody has seen yet."""
    return prompt_of(agent, tokens(2 * seed, QUESTION), tokens(2 * seed + 1, ANSWER), **more)


def engine_of(budget: float = 0.0, **settings: Any) -> Stepped:
    """An engine that learns while requests run as far as the budget lets it."""
    engine = Stepped(**{"kv_memory": "512 blocks", **settings})
    engine.core.parts.learning.budget._share = engine.core.scheduler._learning_share = budget
    return engine


def learning(engine: Stepped) -> dict[str, Any]:
    return engine.stats("learning")


def observed(engine: Stepped) -> int:
    """Values that were learned from."""
    values: int = engine.stats("anchors")["observed"]
    return values


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
        sequences.append(engine.submit(replace(request, tenant=TenantId(f"tenant-{seed % 2}"))))
        engine.step()
    engine.rest()
    assert [len(one.response) for one in sequences] == [6] * 30
    all_is_given_back(engine)


# runs -----------------------------------------------------------------------------------------------------------------


def wrote(engine: Stepped, seed: int, run: str) -> RequestSequence:
    """A finished call that leaves its answer's KV to its run, and is still to be learned from."""
    sequence = engine.submit(prompt_of("writer", tokens(seed, QUESTION), run=run, produces="agent_writer@0"))
    engine.rest()
    return sequence


def is_known(engine: Stepped, writer: RequestSequence) -> bool:
    """Whether the KV of an answer is kept for those that read it."""
    request = writer.request
    found = engine.core.parts.learned[1].find(
        request.run_key, SampleId.parse("agent_writer@0"), tuple(writer.response), ()
    )
    return found is not None


def test_a_run_is_forgotten_once_nothing_of_it_is_left_to_be_learned_from() -> None:
    engine = engine_of()
    first, second = wrote(engine, 1, "first"), wrote(engine, 2, "second")
    engine.core.end_run(RunKey(SPACE, "client", RunId("first")))
    assert is_known(engine, first), "it is still to be learned from"
    while learning(engine)["pending"] == 2:
        engine.core.parts.learning.backlog.step()
    assert (is_known(engine, first), is_known(engine, second)) == (False, True), "whoever else is pending"
    engine.learn()
    assert is_known(engine, second), "its run goes on"
    engine.core.end_run(RunKey(SPACE, "client", RunId("second")))
    assert not is_known(engine, second)
    assert not engine.core.parts.learning.backlog and not engine.core.parts.learning.backlog._ended


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
    stranger = replace(reader(3, reuse=ReuseMode.EXACT), tenant=TenantId("stranger"))
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
    """Of a machine on which translating takes as long as computing 30 tokens, and no more for longer values."""

    translations = (30e-4, 0.0)


def read(engine: Stepped, placeholder: str, times: int) -> None:
    """Let a value of a placeholder be read so often."""
    for _ in range(times):
        engine.core.parts.runtime._readers.read(PoolKey(SPACE, WorkflowId("flow"), placeholder), (1,))


@pytest.mark.parametrize("readers", [2, 6])
def test_what_costs_less_to_compute_is_computed_and_nothing_is_done_for_it(readers: int) -> None:
    """The answer (24 tokens) is never worth translating. The question (40 tokens) is, from so many readers on that what
    each saves, the time of 10 tokens, makes up for its base prefill.
    """
    engine = Stepped(Costly, planner=PlannerConstants(min_translated=0.0))
    for placeholder in PLACEHOLDERS:
        read(engine, placeholder, readers)
    for seed in range(4):
        engine.serve(reader(seed, run=f"run-{seed}"))
        engine.core.parts.cache.clear()
    slots = {key.placeholder for key in engine.core.parts.learned[0].pools}
    assert slots == ({"user_question"} if readers == 6 else set())
    receipt = engine.serve(replace(reader(2), run=RunId("again"))).receipt()
    assert bool(receipt.translated) == (readers == 6)
    reasons = {miss.segment: miss.reason for miss in receipt.misses}
    assert reasons["agent_writer_current"] == "computing it takes less time than translating it"
    assert ("user_question" in reasons) == (readers == 2)
    base_prefills = 1 + 4 if readers == 6 else 1
    assert learning(engine)["base_prefills_done"] == base_prefills, "the template's, and one a value"
