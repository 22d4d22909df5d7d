"""Lanes in steps with little room: holes are merged and cut, and no kind of request starves another."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm.conftest import BLOCK, Answers, Driver, prompt, receipt
from tests.integrations.vllm.lane_prompts import (
    LENGTH,
    ONE,
    PLAIN,
    WIDE,
    Recorder,
    add,
    answers,
    ask,
    lane_engine,
    more_holes,
    recorded,
    tokens,
)
from tests.transformers_over_kv import difference, reference


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def narrow(tiny_llama: Path, stock_answers: object, request: pytest.FixtureRequest) -> Iterator[Driver]:  # noqa: ARG001 - first
    with lane_engine(
        tiny_llama, asynchronous=request.param, max_num_batched_tokens=48, max_num_seqs=4, num_gpu_blocks_override=96
    ) as built:
        yield built


def check_budget(recorder: Recorder) -> None:
    assert max(sum(count for _, count in step.values()) for step in recorder.steps) <= 48
    assert max(map(len, recorder.steps)) <= 4


def test_holes_that_never_fit_are_merged_and_cut(narrow: Driver, tiny_llama: Path) -> None:
    narrow.reset()
    with recorded(narrow) as recorder, more_holes(narrow, WIDE):
        output = ask(narrow, ONE)
        found = recorder.read()
    check_budget(recorder)
    assert recorder.admission() == [(41, 39), (101, 2), (150, 1), (171, 6)], "three lanes, and dense from 171 on"
    assert receipt(output)["tokens"]["translated"] == 41 + 21 + 47 + 20
    holes = range(41, 80), range(101, 103), range(150, 151), range(171, LENGTH)
    expected, _ = reference(tiny_llama).compute(tokens(ONE), found, holes)
    assert difference(found, expected) < 1e-4


def test_crowds_of_both_kinds_come_through(narrow: Driver, stock_answers: Answers) -> None:
    narrow.reset()
    with recorded(narrow) as recorder:
        holed = [add(narrow, ONE, 12) for _ in range(6)]
        plain, planned = [narrow.add(PLAIN[at], 40) for at in range(4)], set[int]()
        for _ in range(30):
            narrow.step()
            planned.add(len(narrow.worker._learner.planned))
        narrow.run(most=400)
    check_budget(recorder)
    assert recorder.lanes and max(planned) <= 4, "those that cannot start yet are not judged"
    assert answers(narrow, *plain) == [stock_answers["plain", at] for at in range(4)]
    assert all(len(one) == 12 for one in answers(narrow, *holed))


@pytest.mark.parametrize("stream", ["plain", "holed"])
def test_a_stream_of_one_kind_starves_no_request_of_the_other(narrow: Driver, stream: str) -> None:
    narrow.reset()
    plain, holed = (lambda: narrow.add(PLAIN[0], 12)), (lambda: add(narrow, ONE, 12))
    more, wanted = (plain, holed) if stream == "plain" else (holed, plain)
    for _ in range(4):
        more()
    name = wanted()
    for _ in range(200):
        if len(narrow.scheduler.requests) < 6:
            more()
        narrow.step()
        if name in narrow.finished:
            break
    assert name in narrow.finished
    narrow.run()


def test_a_request_without_free_blocks_slows_no_running_prefill(narrow: Driver) -> None:
    narrow.reset()
    held = narrow.pool.get_new_blocks(narrow.pool.get_num_free_blocks() - 8)
    with recorded(narrow) as recorder:
        running = narrow.add(prompt(200, 50), 4)
        narrow.step()
        waiting = add(narrow, ONE, 4)
        narrow.run(until=lambda: running in narrow.finished)
        prefill = [step for step in recorder.steps if sum(count for _, count in step.values()) > 1]
        assert [sum(count for _, count in step.values()) for step in prefill] == [48, 48, 48, 48, 8]
        assert waiting not in narrow.finished
        narrow.pool.free_blocks(held)
        narrow.run()
    assert waiting in narrow.finished and LENGTH > 8 * BLOCK


def test_a_request_that_is_held_back_is_not_passed(narrow: Driver) -> None:
    """The rest of a prefill leaves room for a short prompt, but not for the lanes of the one before it."""
    if narrow.scheduler.scheduler_config.async_scheduling:
        pytest.skip("the verdict comes a step later there, when the rest of the prefill is over")
    narrow.reset()
    with recorded(narrow) as recorder, more_holes(narrow, WIDE):
        narrow.add(prompt(20, 51), 30)
        holed = add(narrow, ONE, 4)
        narrow.add(prompt(48, 52), 30)  # 28 tokens beside the first prompt, while the workers judge, and 20 then
        short = narrow.add(prompt(5, 53), 4)
        narrow.run()
    began = [next(at for at, step in enumerate(recorder.steps) if started(step, one)) for one in (holed, short)]
    assert recorder.lanes
    assert sum(count for _, count in recorder.steps[began[0] - 1].values()) <= 22, "it waited although there was room"
    assert began[0] <= began[1]


def started(step: dict[str, Any], name: str) -> bool:
    return any(one.startswith(f"{name}-") for one in step)
