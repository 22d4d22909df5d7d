"""Prompts that are translated before their requests arrive: the same answers, whatever became of the hint."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm import SamplingParams  # noqa: E402
from vllm.v1.engine import EngineCoreRequest  # noqa: E402

from kedge.integrations.vllm.plugin import learner  # noqa: E402
from kedge.integrations.vllm.plugin.learner import ExpectedPrompts  # noqa: E402
from kedge.reuse.costs import MAX_PENDING  # noqa: E402
from kedge.types import RunId  # noqa: E402
from tests.integrations.vllm.conftest import Driver, prompt, receipt  # noqa: E402
from tests.integrations.vllm.lane_prompts import (  # noqa: E402
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
def translated(engine: Driver, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first positions of what is translated only once its request is admitted."""
    found: list[int] = []
    writes = engine.worker._learner.writes
    write = writes._translate_into

    def noting(table: Any, items: Any) -> None:
        found.extend(one.start for one in items)
        write(table, items)

    monkeypatch.setattr(writes, "_translate_into", noting)
    return found


def message(engine: Driver, words: list[int], kedge: dict[str, Any]) -> None:
    """Hints without a request, as Kedge's engine sends them."""
    params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"kedge": kedge}})
    request = EngineCoreRequest(
        request_id=f"message-{time.monotonic_ns()}", prompt_token_ids=words, mm_features=None, sampling_params=params,
        pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
        abort_immediately=True,
    )  # fmt: skip
    engine.core.add_request(*engine.core.preprocess_add_request(request))


def expect(engine: Driver, number: int, segments: int = WHOLE, **more: Any) -> None:
    """The hint that a prompt is expected of which so many segments are known, and its preparation."""
    found = hints(number, **more)
    for at, one in enumerate(found["segments"]):
        if at >= segments and "sample" in one:
            one["length"] = 0
    parts = [PARTS[0], QUESTIONS[number], PARTS[1], FACTS[number], PARTS[2]]
    known = [part for part, one in zip(parts, found["segments"], strict=True) if one["length"]]
    message(engine, sum(known, []), {**found, "ahead": True})
    engine.run()


def prepared(engine: Driver) -> ExpectedPrompts:
    found: ExpectedPrompts = engine.worker._learner._expected
    return found


@pytest.mark.parametrize(("segments", "left"), [(WHOLE, []), (3, [221 - 50, 221])])
def test_what_was_known_is_not_translated_again(
    engine: Driver, answers: dict[int, list[int]], translated: list[int], segments: int, left: list[int]
) -> None:
    expect(engine, ONE, segments)
    assert len(prepared(engine)) == 1 and not prepared(engine).is_due
    output = ask(engine, ONE)
    assert list(output.outputs[0].token_ids) == answers[ONE]
    assert receipt(output)["tokens"]["computed"] == sum(map(len, HOLES))
    assert receipt(output)["preassembled"] == (LENGTH if segments == WHOLE else 171)
    assert translated == left and not len(prepared(engine)) and not prepared(engine).nbytes


def test_a_hint_that_knows_more_goes_on_from_the_one_before(
    engine: Driver, answers: dict[int, list[int]], translated: list[int]
) -> None:
    expect(engine, ONE, 3)
    half = prepared(engine).nbytes
    expect(engine, ONE)
    assert 0 < half < prepared(engine).nbytes
    assert list(ask(engine, ONE).outputs[0].token_ids) == answers[ONE]
    assert not translated


def test_another_prompt_than_expected_is_translated_as_ever(
    engine: Driver, answers: dict[int, list[int]], translated: list[int]
) -> None:
    expect(engine, OTHER, run=f"r{ONE}")
    assert list(ask(engine, ONE).outputs[0].token_ids) == answers[ONE]
    assert len(translated) == 4 and not len(prepared(engine))


def test_offsets_that_moved_since_do_not_spoil_it(
    engine: Driver, answers: dict[int, list[int]], translated: list[int]
) -> None:
    """Learning moves the rows of tables, which makes blends of them invalid; what is ready needs none."""
    expect(engine, ONE)
    for pool in engine.worker._learner.learned[0].pools.values():
        for table in pool.tables:
            table.version += 1
    assert list(ask(engine, ONE).outputs[0].token_ids) == answers[ONE]
    assert not translated


def test_an_exact_prefix_that_reaches_further_is_not_written_over(engine: Driver) -> None:
    engine.reset()
    engine.ask(tokens(ONE), 1, hints(ONE, reuse="exact"))
    expect(engine, ONE)
    output = ask(engine, ONE)
    assert receipt(output)["tokens"]["device"] > 200
    later = engine.answer(tokens(ONE), count=12)
    engine.reset()
    assert later == engine.answer(tokens(ONE), count=12), "what is in the prefix cache is exact"


def test_the_end_of_a_run_and_a_cleared_cache_forget_it(engine: Driver) -> None:
    expect(engine, ONE)
    message(engine, [5], {"run": f"r{ONE}", "final": True})
    engine.run()
    engine.ask(prompt(40, 9))
    assert not len(prepared(engine))
    expect(engine, ONE)
    prepared(engine).clear()
    assert not prepared(engine).is_due


def test_preparations_are_bounded_in_number_and_in_bytes(engine: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    for at in range(MAX_PENDING + 3):
        expect(engine, ONE, run=f"many-{at}")
    assert len(prepared(engine)) == MAX_PENDING
    each = prepared(engine).nbytes // MAX_PENDING
    monkeypatch.setattr(prepared(engine), "_max_bytes", 3 * each)
    expect(engine, OTHER, run="one-more")
    assert prepared(engine).nbytes <= 3 * each
    kept = {one.request.run for one in prepared(engine)._expected.values()}
    assert RunId("one-more") in kept
    prepared(engine).clear()


@pytest.mark.parametrize("wrong", [{"segments": "all"}, {"agent": "stranger"}, {"reuse": "exact"}, {"segments": []}])
def test_hints_that_are_of_no_use_are_harmless(
    engine: Driver, answers: dict[int, list[int]], wrong: dict[str, Any]
) -> None:
    message(engine, tokens(ONE), {**hints(ONE), "ahead": True, **wrong})
    engine.run()
    assert not prepared(engine).is_due
    assert list(ask(engine, ONE).outputs[0].token_ids) == answers[ONE]


def test_a_preparation_that_fails_is_dropped(
    engine: Driver, answers: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(learner, "translated", fail)
        expect(engine, ONE)
    assert not len(prepared(engine))
    assert list(ask(engine, ONE).outputs[0].token_ids) == answers[ONE]
