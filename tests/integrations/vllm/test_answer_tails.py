"""The end of an answer that others read: its KV is what Transformers computes, and nothing is left of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kedge.kv.segment import KVSegment
from tests.integrations.vllm.conftest import BLOCK, Driver, prompt
from tests.integrations.vllm.lane_prompts import difference, lane_engine, reference

EXACT = 1e-4
ANSWER = 20
ASKED = {"workflow": "w", "run": "chain", "agent": "writer", "produces": "answer@0"}
AROUND = [
    pytest.param(50, id="in the last block"),
    pytest.param(2 * BLOCK - ANSWER - 1, id="over the end of a block"),
    pytest.param(2 * BLOCK - ANSWER, id="in a new block"),
]


class Kept:
    """The KV of answers that an engine keeps for their readers."""

    def __init__(self, engine: Driver, patched: pytest.MonkeyPatch) -> None:
        self.answers: list[tuple[list[int], KVSegment]] = []
        runtime = engine.worker._learner._runtime
        keep = runtime.keep_response

        def keeping(request: Any, tokens: Any, kv: KVSegment, **more: Any) -> None:
            self.answers.append((list(tokens), kv.owned()))
            keep(request, tokens, kv, **more)

        patched.setattr(runtime, "keep_response", keeping)


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(tiny_llama: Path, request: pytest.FixtureRequest) -> Iterator[Driver]:
    with lane_engine(tiny_llama, asynchronous=request.param, is_taught=False, extra={}, max_num_seqs=16) as built:
        yield built


@pytest.fixture
def kept(engine: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    """Every test begins and ends with an idle engine."""
    engine.reset()
    engine.worker._learner.clear()
    yield Kept(engine, monkeypatch)
    engine.run()
    engine.ask(prompt(40, 9), 1)  # a step gives the workers what has finished
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    assert not [one for one in runner.requests if one.startswith("lane-")]
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
    assert not engine.side.translations.held.block_ids and not engine.scheduler.deferred_frees


def computed(model: Path, asked: list[int], answer: list[int]) -> KVSegment:
    """The KV of an answer behind its prompt."""
    found, _ = reference(model).dense(asked + answer)
    return found.slice(len(asked), len(asked + answer))


@pytest.mark.parametrize("length", AROUND)
@pytest.mark.parametrize("count", [1, ANSWER])
def test_an_answer_is_kept_with_its_last_token(
    engine: Driver, kept: Kept, tiny_llama: Path, length: int, count: int
) -> None:
    asked = prompt(length + ANSWER - count, 11)
    answer = engine.answer(asked, count, ASKED)
    ((tokens, kv),) = kept.answers
    assert tokens == answer
    assert difference(kv, computed(tiny_llama, asked, tokens)) < EXACT


def test_the_token_that_stops_an_answer_is_not_part_of_it(engine: Driver, kept: Kept, tiny_llama: Path) -> None:
    asked = prompt(50, 11)
    stop = engine.answer(asked, 12)[-1]
    answer = engine.answer(asked, 100, ASKED, stop_token_ids=[stop])
    ((tokens, kv),) = kept.answers
    assert answer[-1] == stop and tokens == answer[:-1]
    assert difference(kv, computed(tiny_llama, asked, tokens)) < EXACT


def test_a_reader_needs_no_base_prefill_of_an_answer(
    engine: Driver, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed: list[list[int]] = []
    monkeypatch.setattr(engine.side.translations.lanes.jobs, "add", lambda _, tokens, **__: needed.append(list(tokens)))
    head, after = prompt(41, 1), prompt(70, 2)
    value = engine.answer(prompt(50, 11), ANSWER, ASKED)
    segments = [
        {"name": "p0", "length": len(head)},
        {"name": "answer", "length": len(value), "sample": "answer@0"},
        {"name": "p1", "length": len(after)},
    ]
    reader = {"workflow": "w", "run": "chain", "agent": "reader", "segments": segments}
    engine.ask(head + value + after, kedge=reader)
    assert needed and value not in needed
    engine.ask(head + value + after, kedge={**reader, "run": "elsewhere"})
    assert value in needed, "without its producer's KV it is prefilled once more"
    assert len(kept.answers) == 1


def test_a_step_of_a_lane_alone_counts_as_a_step(engine: Driver, kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the numbers of its steps vLLM knows when blocks that are freed late may be used again."""
    monkeypatch.setattr(engine.scheduler, "defer_block_free", True)
    engine.answer(prompt(50, 11), ANSWER, ASKED)
    assert len(kept.answers) == 1
    assert engine.scheduler.sched_step_seq == engine.scheduler.processed_step_seq > 0


def test_many_answers_at_once_end_as_each_alone(engine: Driver, kept: Kept, tiny_llama: Path) -> None:
    """Twice as many as there are rows, of all lengths; every fourth is aborted."""
    prompts = [prompt(40 + 3 * number, 400 + number) for number in range(32)]
    names = [engine.add(one, 10 + number % 3, {**ASKED, "run": f"run {number}"}) for number, one in enumerate(prompts)]
    for _ in range(4):
        engine.step()
    engine.engine.abort_request(names[::4])
    engine.run()
    complete = 0
    for tokens, kv in kept.answers:
        for name, asked in zip(names, prompts, strict=True):
            if name in engine.finished and list(engine.finished[name].outputs[0].token_ids) == tokens:
                complete += 1
                assert difference(kv, computed(tiny_llama, asked, tokens)) < EXACT
    assert complete == 24
