"""Prompts that are drafted before their requests arrive: the same answers, whatever became of the hint."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kedge.integrations.vllm.plugin.learner import DraftedPrompts
from tests.integrations.vllm.conftest import Driver, prompt, receipt
from tests.integrations.vllm.lane_prompts import (
    FACTS,
    HOLES,
    LENGTH,
    ONE,
    OTHER,
    PARTS,
    QUESTIONS,
    ask,
    hints,
    lane_engine,
    tokens,
)

WHOLE = 5
"""Segments of a prompt"""


@pytest.fixture(scope="module", params=[pytest.param("sync", marks=pytest.mark.slow), "async"])
def engine(tiny_llama: Path, request: Any) -> Iterator[Driver]:
    with lane_engine(tiny_llama, asynchronous=request.param == "async") as built:
        yield built


@pytest.fixture
def answers(engine: Driver) -> dict[int, list[int]]:
    """What is answered without preparation; nothing is expected."""
    prepared(engine).clear()
    found = {}
    for number in (ONE, OTHER):
        engine.reset()
        found[number] = list(ask(engine, number).outputs[0].token_ids)
    engine.reset()
    return found


@pytest.fixture
def looked_up(engine: Driver, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The segments that are drafted from now on."""
    found: list[int] = []
    planner = engine.worker._learner._runtime.planner
    fill = planner._fill

    def noting(draft: Any, here: Any) -> None:
        found.extend([here.index] if here.segment.is_placeholder else [])
        fill(draft, here)

    monkeypatch.setattr(planner, "_fill", noting)
    return found


def message(engine: Driver, words: list[int], kedge: dict[str, Any]) -> None:
    """Hints without a request, as Kedge's engine sends them."""
    engine.core.kedge("tell", [(kedge, "", words)])


def expect(engine: Driver, number: int, segments: int = WHOLE, **more: Any) -> None:
    """The hint that a prompt is expected of which so many segments are known, and its preparation."""
    found = hints(number, **more)
    for at, one in enumerate(found["segments"]):
        if at >= segments and "sample" in one:
            one["length"] = 0
    parts = [PARTS[0], QUESTIONS[number], PARTS[1], FACTS[number], PARTS[2]]
    known = [part for part, one in zip(parts, found["segments"], strict=True) if one["length"]]
    message(engine, sum(known, []), found)
    engine.run()


def prepared(engine: Driver) -> DraftedPrompts:
    return engine.worker._learner.expected


@pytest.mark.parametrize(("segments", "left"), [(WHOLE, []), (3, [3])])
def test_what_was_known_is_not_looked_up_again(
    engine: Driver, answers: dict[int, list[int]], looked_up: list[int], segments: int, left: list[int]
) -> None:
    expect(engine, ONE, segments)
    assert len(prepared(engine)) == 1 and not prepared(engine).is_due
    looked_up.clear()
    output = ask(engine, ONE)
    assert list(output.outputs[0].token_ids) == answers[ONE]
    assert receipt(output)["tokens"]["computed"] == sum(map(len, HOLES))
    assert receipt(output)["preassembled"] == (LENGTH if segments == WHOLE else 171)
    assert looked_up == left and not prepared(engine)


def test_a_hint_that_knows_more_goes_on_from_the_one_before_and_a_late_one_changes_nothing(
    engine: Driver, answers: dict[int, list[int]], looked_up: list[int]
) -> None:
    expect(engine, ONE, 3)
    expect(engine, ONE)
    expect(engine, ONE, 3)
    assert looked_up == [1, 3]
    assert list(ask(engine, ONE).outputs[0].token_ids) == answers[ONE] and looked_up == [1, 3]


def test_another_prompt_than_expected_is_translated_as_ever(
    engine: Driver, answers: dict[int, list[int]], looked_up: list[int]
) -> None:
    expect(engine, OTHER, run=f"r{ONE}")
    assert list(ask(engine, ONE).outputs[0].token_ids) == answers[ONE]
    assert looked_up == [1, 3, 1, 3] and not prepared(engine)


def test_offsets_that_moved_since_are_looked_up_again(
    engine: Driver, answers: dict[int, list[int]], looked_up: list[int]
) -> None:
    """Learning moves the rows of tables, which makes blends of them invalid."""
    expect(engine, ONE)
    for pool in engine.worker._learner.anchors.pools.values():
        for table in pool.tables:
            table.version += 1
    output = ask(engine, ONE)
    assert list(output.outputs[0].token_ids) == answers[ONE] and receipt(output)["preassembled"] == 0
    assert looked_up == [1, 3, 1, 3]


def test_an_exact_prefix_that_reaches_further_is_not_written_over(engine: Driver) -> None:
    engine.reset()
    engine.ask(tokens(ONE), 1, hints(ONE, reuse="exact"))
    expect(engine, ONE)
    output = ask(engine, ONE)
    assert receipt(output)["tokens"]["device"] > 200
    later = engine.answer(tokens(ONE), count=12)
    engine.reset()
    assert later == engine.answer(tokens(ONE), count=12), "what is in the prefix cache is exact"


def test_the_end_of_a_run_forgets_it(engine: Driver) -> None:
    expect(engine, ONE)
    message(engine, [5], {"run": f"r{ONE}", "final": True})
    engine.run()
    engine.ask(prompt(40, 9))
    assert not prepared(engine)


@pytest.mark.parametrize("wrong", [{"segments": "all"}, {"agent": "stranger"}, {"reuse": "exact"}, {"segments": []}])
def test_hints_that_are_of_no_use_are_harmless(
    engine: Driver, answers: dict[int, list[int]], wrong: dict[str, Any]
) -> None:
    message(engine, tokens(ONE), {**hints(ONE), **wrong})
    engine.run()
    assert not prepared(engine).is_due
    assert list(ask(engine, ONE).outputs[0].token_ids) == answers[ONE]


def test_a_preparation_that_fails_is_dropped(
    engine: Driver, answers: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(engine.worker._learner._runtime.planner, "grow", fail)
        expect(engine, ONE)
    assert not prepared(engine)
    assert list(ask(engine, ONE).outputs[0].token_ids) == answers[ONE]
