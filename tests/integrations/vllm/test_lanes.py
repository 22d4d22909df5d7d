"""Lanes among other requests, the prefix cache, aborts, failures and preemption. Nothing is left."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kedge.errors import PlanError
from kedge.reuse.holes import Holes, joined
from tests.integrations.vllm.conftest import BLOCK, Answers, Driver, prompt, receipt
from tests.integrations.vllm.lane_prompts import (
    HOLES,
    ONE,
    OTHER,
    PLAIN,
    WIDE,
    Recorder,
    add,
    answers,
    ask,
    check_rest,
    hints,
    lane_engine,
    leaving_nothing,
    more_holes,
    recorded,
    solo,
    teach,
    tokens,
)


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(tiny_llama: Path, stock_answers: object, request: pytest.FixtureRequest) -> Iterator[Driver]:  # noqa: ARG001 - first
    with lane_engine(tiny_llama, asynchronous=request.param) as built:
        yield built


@pytest.fixture
def recorder(engine: Driver) -> Iterator[Recorder]:
    """Every test begins and ends with an idle engine."""
    with leaving_nothing(engine, knows_nothing=False), recorded(engine) as recorder, more_holes(engine, WIDE):
        yield recorder
        check_rest(engine)
        assert recorder.lanes <= recorder.finished, "the workers drop every lane"


@pytest.fixture
def learned(engine: Driver, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """By which plans KV of prompts is learned from; None: as the model has computed it."""
    plans, runtime = list[object](), engine.worker._learner._runtime
    keep = runtime.keep_base
    monkeypatch.setattr(runtime, "keep_base", lambda *given: (plans.append(given[2]), keep(*given)))
    return plans


def test_nothing_translated_is_found_in_the_prefix_cache(
    engine: Driver, recorder: Recorder, stock_answers: Answers
) -> None:
    """The head that is computed in front of the first translated token is exact, and may be found."""
    head: Holes = (range(BLOCK + 40),)
    with more_holes(engine, head):
        ask(engine, ONE)
    again = engine.ask(tokens(ONE), 40)
    assert again.num_cached_tokens == 2 * BLOCK, "the full blocks of the head, and no other"
    assert list(again.outputs[0].token_ids) == stock_answers[ONE]
    assert recorder.lanes


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
def test_an_abort_harms_no_other(
    engine: Driver, recorder: Recorder, stock_answers: Answers, learned: list[object], steps: int
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
    assert None not in learned, "what was translated is never taken for computed"


def test_an_abort_of_one_that_was_preempted_between_steps_harms_no_other(
    engine: Driver, recorder: Recorder, stock_answers: Answers
) -> None:
    """By a reset, or a pause: vLLM tells of it in the next step, the abort before."""
    if type(engine.scheduler).__name__ == "AsyncStepScheduler":
        pytest.skip("vLLM frees their blocks later then, and so refuses")
    other, name = engine.add(PLAIN[0], 40), add(engine, ONE)
    for _ in range(6):
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.engine.abort_request([name])
    engine.run()
    assert recorder.lanes and answers(engine, other) == [stock_answers["plain", 0]]


def test_what_was_learned_is_forgotten_with_the_other_caches(engine: Driver, recorder: Recorder) -> None:
    """The weights may be new."""
    running = add(engine, OTHER)
    for _ in range(6):
        engine.step()
    waiting = add(engine, ONE)
    assert recorder.lanes and engine.connector.reset_cache()
    engine.run()
    assert len(engine.finished[running].outputs[0].token_ids) == 40
    last = ask(engine, OTHER)
    assert [receipt(done)["tokens"]["translated"] for done in (engine.finished[waiting], last)] == [0, 0]
    assert engine.worker._learner.anchors.stats().anchors == 2, "one of each of the last one's values"
    teach(engine)
    assert receipt(ask(engine, ONE))["tokens"]["translated"]


def test_a_cached_prompt_of_whole_blocks_is_judged_as_any_other(engine: Driver, recorder: Recorder) -> None:  # noqa: ARG001
    end = prompt(-len(tokens(ONE)) % BLOCK, 7)
    asked = hints(ONE, agent="stranger")
    asked["segments"][-1]["length"] += len(end)
    done = [engine.ask(tokens(ONE) + end, 1, asked) for _ in range(2)][-1]
    assert receipt(done)["tokens"]["device"] == len(tokens(ONE) + end) - BLOCK
    assert "failed" not in str(receipt(done)["misses"])


def test_a_preempted_request_gets_its_lanes_again(engine: Driver, recorder: Recorder) -> None:
    alone = [solo(engine, ONE, 90), solo(engine, OTHER, 90)]
    engine.reset()
    before, held = len(recorder.lanes), engine.pool.get_new_blocks(engine.pool.get_num_free_blocks() - 22)
    names = [add(engine, number, 90) for number in (ONE, OTHER)]  # there is no room for both
    requests = list(engine.scheduler.requests.values())
    engine.run()
    engine.pool.free_blocks(held)
    assert sum(request.num_preemptions for request in requests) > 0
    assert all(receipt(engine.finished[name])["tokens"]["translated"] > 200 for name in names)
    assert answers(engine, *names) == alone
    lanes = len(joined((*HOLES, *WIDE), 4)) - 1
    assert len(recorder.lanes) - before >= 3 * lanes


def test_a_failed_write_ends_its_request_alone(
    engine: Driver, recorder: Recorder, stock_answers: Answers, learned: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lanes of that step are of no use, and nothing is learned from what its blocks held."""

    def fail(*_: object) -> None:
        raise PlanError("blend", 1, "the table is at version 2")

    other = engine.add(PLAIN[0], 40)
    engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(engine.worker._learner, "_translate_into", fail)
        name = add(engine, ONE)
        engine.run()
    assert recorder.lanes
    assert answers(engine, name, other) == [[], stock_answers["plain", 0]] and not learned
    assert engine.answer(tokens(ONE), 40) == stock_answers[ONE]


def test_an_exact_prefix_that_grew_is_not_written(
    engine: Driver, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.connector, "judge_at_once", lambda _: None)  # a step passes until the answer
    engine.add(PLAIN[0], 40)
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
    monkeypatch.setattr(engine.connector, "judge_at_once", lambda _: None)
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


@pytest.mark.parametrize("run", [None, "another's", f"r{ONE}"])
def test_a_request_is_judged_at_once_unless_something_of_its_run_is_to_be_captured(
    engine: Driver, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, run: str | None
) -> None:
    delays, answer = list[bool](), engine.worker.answer
    monkeypatch.setattr(engine.worker, "answer", lambda query: (delays.append(query.delays), answer(query))[1])
    if run:
        engine.add(tokens(OTHER), 40, hints(OTHER, run=run))
        engine.run(until=lambda: any(engine.side.translations._completed))
    name = add(engine, ONE)
    engine.step()
    request = next(one for one in engine.scheduler.requests.values() if one.request_id.startswith(name))
    is_at_once = type(engine.scheduler).__name__ == "AsyncStepScheduler" and run != f"r{ONE}"
    assert bool(request.num_computed_tokens) is is_at_once is not delays[-1], "else in a step"
    engine.run()
    assert recorder.lanes and receipt(engine.finished[name])["tokens"]["translated"]
