"""Holes in the middle of a prompt, computed by lanes: equal to plain PyTorch over the same KV, alone and among other
requests, the prefix cache, aborts and preemption. Nothing is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kedge.errors import PlanError
from kedge.kv.segment import KVSegment
from kedge.reuse.holes import Holes, between, joined
from tests.integrations.vllm.conftest import BLOCK, VOCABULARY, Driver, prompt, receipt
from tests.integrations.vllm.lane_prompts import (
    HOLES,
    LENGTH,
    ONE,
    OTHER,
    PLAIN,
    WIDE,
    Recorder,
    add,
    answers,
    ask,
    computed_by_torch,
    difference,
    first_logprobs,
    lane_engine,
    more_holes,
    preempted,
    recorded,
    solo,
    tokens,
)

EXACT = 1e-4
EMPTY = KVSegment(torch.zeros(3, LENGTH, 2, 32), torch.zeros(3, LENGTH, 2, 32))
LAYOUTS: dict[str, Holes] = {
    "the planner's": (),
    "over several blocks": (range(60, 150),),
    "in one block": (range(65, 67), range(72, 73), range(80, 85), range(90, 94)),
    "single tokens": tuple(range(at, at + 1) for at in range(50, 290, 20)),
    "next to the end": (range(288, 294),),
    "right behind the exact prefix": (range(0, 70), range(120, 125)),
}


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(tiny_llama: Path, stock_answers: object, request: pytest.FixtureRequest) -> Iterator[Driver]:  # noqa: ARG001 - first
    with lane_engine(tiny_llama, asynchronous=request.param) as built:
        yield built


# over KV that is known --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_holes_are_what_torch_computes_over_translated_kv(engine: Driver, tiny_llama: Path, layout: str) -> None:
    holes = joined((*HOLES, *LAYOUTS[layout]), nearer_than=4)
    engine.reset()
    with recorded(engine) as recorder, more_holes(engine, LAYOUTS[layout]):
        output = ask(engine, OTHER, logprobs=VOCABULARY)
        found = recorder.read()
    assert recorder.admission() == [(hole.start, len(hole)) for hole in holes], "all in one pass"
    assert recorder.written is not None
    expected, logprobs = computed_by_torch(tiny_llama, tokens(OTHER), recorder.written, holes)
    assert difference(found, expected, holes) < EXACT
    assert difference(found, recorder.written, between(holes, 0)) == 0, "what was translated is left alone"
    assert float((first_logprobs(output) - logprobs).abs().max()) < EXACT
    counts = receipt(output)["tokens"]
    computed = sum(map(len, holes))
    assert counts == {"device": 0, "host": 0, "translated": LENGTH - computed, "computed": computed}
    assert recorder.hits == output.num_cached_tokens == counts["translated"], "vLLM counts holes as computed, too"
    full, _ = computed_by_torch(tiny_llama, tokens(OTHER), found, (range(LENGTH),))
    assert difference(found, full, holes) > 0.1, "else the comparison says nothing"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_over_true_kv_everything_is_as_in_dense_prefill(
    stock_answers: dict[Any, list[int]], engine: Driver, tiny_llama: Path, layout: str
) -> None:
    engine.reset()
    with recorded(engine) as recorder, more_holes(engine, LAYOUTS[layout]):
        true, logprobs = computed_by_torch(tiny_llama, tokens(OTHER), EMPTY, (range(LENGTH),))
        recorder.replacement = true
        output = ask(engine, OTHER, logprobs=VOCABULARY)
        found = recorder.read()
    assert receipt(output)["tokens"]["translated"] > 0
    assert difference(found, true) < EXACT
    assert float((first_logprobs(output) - logprobs).abs().max()) < EXACT
    assert list(output.outputs[0].token_ids) == stock_answers[OTHER][:12]


# among others ------------------------------------------------------------------------------------------------------


@pytest.fixture
def recorder(engine: Driver) -> Iterator[Recorder]:
    """Every test begins and ends with an idle engine."""
    engine.reset()
    before = state(engine)
    with recorded(engine) as recorder, more_holes(engine, WIDE):
        yield recorder
    engine.run()
    engine.ask(prompt(40, 9), 1)  # a step tells the workers what has finished
    assert state(engine) == before
    assert recorder.lanes <= recorder.finished, "the workers drop every lane"


def state(engine: Driver) -> dict[str, int]:
    """What has to be as before once an engine is idle."""
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    known = runner.requests if hasattr(runner, "requests") else runner.req_states.req_id_to_index
    return {
        "free blocks": engine.pool.get_num_free_blocks(),
        "lanes of the runner": sum(one.startswith("lane-") for one in known),
        "requests": len(engine.scheduler.requests),
        "live requests": len(engine.side.requests),
        "planned writes": len(engine.worker._learner.writes),
    }


def test_a_busy_batch_answers_as_each_alone(
    engine: Driver, recorder: Recorder, stock_answers: dict[Any, list[int]]
) -> None:
    alone = [solo(engine, ONE), solo(engine, OTHER)]
    engine.reset()
    decoding = [engine.add(PLAIN[at], 40) for at in (0, 1)]
    for _ in range(5):
        engine.step()
    first, prefill, second = add(engine, ONE), engine.add(PLAIN[2], 40), add(engine, OTHER)
    engine.run()
    widest = max(recorder.steps, key=len)
    assert len(widest) >= 2 * len(joined((*HOLES, *WIDE), 4)) + 2, "lanes of both beside decodes"
    assert answers(engine, first, second) == alone
    assert answers(engine, *decoding, prefill) == [stock_answers["plain", at] for at in (0, 1, 2)]


def test_nothing_translated_is_found_in_the_prefix_cache(
    engine: Driver, recorder: Recorder, stock_answers: dict[Any, list[int]]
) -> None:
    """The head that is computed in front of the first translated token is exact, and may be found."""
    head: Holes = (range(BLOCK + 40),)
    with more_holes(engine, head):
        ask(engine, ONE)
    again = engine.ask(tokens(ONE), 40)
    assert again.num_cached_tokens == 2 * BLOCK, "the full blocks of the head, and no other"
    assert list(again.outputs[0].token_ids) == stock_answers[ONE]
    engine.reset()
    ask(engine, OTHER)
    again = engine.ask(tokens(OTHER), 40)
    assert again.num_cached_tokens == 0
    assert list(again.outputs[0].token_ids) == stock_answers[OTHER]
    assert recorder.lanes


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
def test_an_abort_harms_no_other(
    engine: Driver, recorder: Recorder, stock_answers: dict[Any, list[int]], steps: int
) -> None:
    other = engine.add(PLAIN[0], 40)
    engine.step()
    name = add(engine, ONE)
    for _ in range(steps):
        engine.step()
    engine.engine.abort_request([name])
    engine.run()
    assert answers(engine, other) == [stock_answers["plain", 0]]
    assert steps in (1, 2, 3) or bool(recorder.lanes) == (steps == 4)


def test_a_preempted_request_gets_its_lanes_again(engine: Driver, recorder: Recorder) -> None:
    alone = [solo(engine, ONE, 90), solo(engine, OTHER, 90)]
    engine.reset()
    before = len(recorder.lanes)
    assert answers(engine, *preempted(engine, ONE, OTHER)) == alone
    lanes = len(joined((*HOLES, *WIDE), 4)) - 1
    assert len(recorder.lanes) - before >= 3 * lanes


def test_a_failed_write_ends_its_request_alone(
    engine: Driver, recorder: Recorder, stock_answers: dict[Any, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lanes of that step are of no use."""

    def fail(*_: object) -> None:
        raise PlanError("blend", 1, "the table is at version 2")

    other = engine.add(PLAIN[0], 40)
    engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(engine.worker._learner.writes, "_translate_into", fail)
        name = add(engine, ONE)
        engine.run()
    assert recorder.lanes
    assert answers(engine, name, other) == [[], stock_answers["plain", 0]]
    assert engine.answer(tokens(ONE), 40) == stock_answers[ONE]


def test_an_exact_prefix_that_grew_is_not_written(engine: Driver, recorder: Recorder) -> None:
    engine.add(PLAIN[0], 40)  # beside which a step passes until the answer
    engine.step()
    name = add(engine, ONE)
    engine.add(tokens(ONE)[: 2 * BLOCK] + prompt(20, 8), 4)  # computed while the workers are asked
    engine.run()
    assert receipt(engine.finished[name])["tokens"]["device"] == 2 * BLOCK
    assert min(start for start, _ in recorder.admission()) >= 2 * BLOCK
    assert engine.answer(tokens(ONE)[: 2 * BLOCK] + prompt(20, 8), 4)


def test_what_was_exact_and_is_evicted_while_a_request_waits_is_computed(
    engine: Driver, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.connector, "ask_at_once", lambda _: None)
    head = tokens(ONE)[: 3 * BLOCK + 1]
    engine.ask(head, 1)
    expected = list(ask(engine, ONE, 40).outputs[0].token_ids)
    engine.reset()
    recorder.steps.clear()
    engine.ask(head, 1)
    name = add(engine, ONE)
    request = next(iter(engine.scheduler.requests.values()))
    live = engine.side.requests[request.request_id]
    engine.run(until=lambda: live.verdict is not None)
    assert live.exact == 3 * BLOCK
    assert engine.scheduler.reset_prefix_cache()
    engine.run()
    counts = receipt(engine.finished[name])["tokens"]
    assert counts["device"] == 0 and counts["computed"] > 3 * BLOCK and counts["translated"] > 0
    assert answers(engine, name) == [expected]
    assert recorder.admission()[0] == (0, 3 * BLOCK)


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_request_is_judged_before_its_step_where_nothing_else_runs(
    engine: Driver, recorder: Recorder, is_idle: bool
) -> None:
    if not is_idle:
        engine.add(PLAIN[0], 40)
        engine.step()
    name = add(engine, ONE)
    engine.step()
    request = next(one for one in engine.scheduler.requests.values() if one.request_id.startswith(name))
    assert bool(request.num_computed_tokens) is is_idle, "else in a step, which has a pass anyway"
    engine.run()
    assert recorder.lanes and receipt(engine.finished[name])["tokens"]["translated"]
