"""KV that an engine keeps for others, of answers and base prefills: Transformers computes the same, whatever
else runs, and nothing is left of it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kedge.kv.segment import KVSegment
from tests.integrations.vllm.conftest import BLOCK, Answers, Driver, prompt, receipt
from tests.integrations.vllm.lane_prompts import PARTS, PLAIN, hints, lane_engine, leaving_nothing, tokens
from tests.transformers_over_kv import difference, reference

EXACT = 1e-4
BUDGET = 64
"""Tokens of a step"""


class Captured:
    """The KV of answers, kept for their readers, and of base prefills."""

    def __init__(self, engine: Driver, patched: pytest.MonkeyPatch) -> None:
        self.answers: list[tuple[list[int], KVSegment]] = []
        self.bases: list[tuple[list[int], KVSegment]] = []
        learner = engine.worker._learner
        keep, capture = learner._runtime.keep_response, learner.capture

        def keeping(request: Any, tokens: Any, kv: KVSegment, **more: Any) -> None:
            self.answers.append((list(tokens), kv.owned()))
            keep(request, tokens, kv, **more)

        def capturing(order: Any) -> None:
            if (order.request.namespace, order.request.tokens) in learner._needs:
                kv = learner.pages.read(learner.pages.table(order.blocks), 0, order.request.prompt_tokens)
                self.bases.append((list(order.request.tokens), kv))
            capture(order)

        patched.setattr(learner._runtime, "keep_response", keeping)
        patched.setattr(learner, "capture", capturing)


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(tiny_llama: Path, stock_answers: object, request: pytest.FixtureRequest) -> Iterator[Driver]:  # noqa: ARG001 - first
    size = {"max_num_seqs": 16, "max_num_batched_tokens": BUDGET}
    with lane_engine(tiny_llama, asynchronous=request.param, is_taught=False, **size) as built:
        yield built


@pytest.fixture(autouse=True)
def captured(engine: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Captured]:
    """Every test begins and ends with an idle engine, that has learned nothing at first."""
    with leaving_nothing(engine):
        yield Captured(engine, monkeypatch)


# answers --------------------------------------------------------------------------------------------------------------

ANSWER = 20
ASKED = {"workflow": "w", "run": "chain", "agent": "writer", "produces": "answer@0"}
AROUND = [
    pytest.param(50, id="in the last block"),
    pytest.param(2 * BLOCK - ANSWER - 1, id="over the end of a block"),
    pytest.param(2 * BLOCK - ANSWER, id="in a new block"),
]


def computed(model: Path, asked: list[int], answer: list[int]) -> KVSegment:
    """The KV of an answer behind its prompt, but for the token that was drawn last."""
    found, _ = reference(model).dense(asked + answer)
    return found.slice(len(asked), len(asked + answer) - 1)


@pytest.mark.parametrize("length", AROUND)
@pytest.mark.parametrize("count", [2, ANSWER])
def test_an_answer_is_kept_but_for_the_token_that_was_drawn_last(
    engine: Driver, captured: Captured, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, length: int, count: int
) -> None:
    """No step computes anything for it once it has ended."""
    monkeypatch.setattr(engine.scheduler, "_add", lambda *_: pytest.fail("a lane"))
    asked = prompt(length + ANSWER - count, 11)
    answer = engine.answer(asked, count, ASKED)
    ((answered, kv),) = captured.answers
    assert answered == answer and kv.tokens == count - 1
    assert difference(kv, computed(tiny_llama, asked, answered)) < EXACT


def test_of_an_answer_of_one_token_nothing_is_kept(engine: Driver, captured: Captured) -> None:
    engine.answer(prompt(50, 11), 1, ASKED)
    assert not captured.answers


def test_a_reader_needs_no_base_prefill_of_an_answer(
    engine: Driver, captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed: list[list[int]] = []
    monkeypatch.setattr(engine.side.translations.lanes.prefills, "add", lambda _, one, **__: needed.append(list(one)))
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
    assert len(captured.answers) == 1


def test_many_answers_at_once_end_as_each_alone(engine: Driver, captured: Captured, tiny_llama: Path) -> None:
    """Twice as many as there are rows, of all lengths; every fourth is aborted."""
    prompts = [prompt(40 + 3 * number, 400 + number) for number in range(32)]
    names = [engine.add(one, 10 + number % 3, {**ASKED, "run": f"run {number}"}) for number, one in enumerate(prompts)]
    for _ in range(4):
        engine.step()
    engine.engine.abort_request(names[::4])
    engine.run()
    complete = 0
    for answered, kv in captured.answers:
        for name, asked in zip(names, prompts, strict=True):
            if name in engine.finished and list(engine.finished[name].outputs[0].token_ids) == answered:
                complete += 1
                assert difference(kv, computed(tiny_llama, asked, answered)) < EXACT
    assert complete == 24


# base prefills --------------------------------------------------------------------------------------------------------


def test_base_kv_is_what_transformers_computes_in_pieces(engine: Driver, captured: Captured, tiny_llama: Path) -> None:
    engine.ask(tokens(0), 4, hints(0))
    assert len(captured.bases) == 3, "of the template and of two values"
    assert any(len(one) > BUDGET for one, _ in captured.bases)
    for one, kv in captured.bases:
        expected, _ = reference(tiny_llama).dense(one)
        assert difference(kv, expected) < EXACT


def test_a_step_of_a_lane_alone_counts_as_a_step(
    engine: Driver, captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the numbers of its steps vLLM knows when blocks that are freed late may be used again."""
    monkeypatch.setattr(engine.scheduler, "defer_block_free", True)
    engine.ask(tokens(0), 4, hints(0))
    assert captured.bases
    assert engine.scheduler.sched_step_seq == engine.scheduler.processed_step_seq > 0


def test_aborts_and_many_clients_leave_nothing(engine: Driver, stock_answers: Answers) -> None:
    names = [engine.add(tokens(number % 7), 8, hints(number % 7)) for number in range(32)]
    plain = [engine.add(one, 40) for one in PLAIN]
    for _ in range(6):
        engine.step()
    engine.engine.abort_request(names[::3])
    engine.run()
    assert [list(engine.finished[name].outputs[0].token_ids) for name in plain] == [
        stock_answers["plain", at] for at in range(len(PLAIN))
    ]
    assert len(set(names) & engine.finished.keys()) == 32 - len(names[::3])


def test_a_busy_engine_computes_base_kv_before_the_prompts_that_read_it(engine: Driver, captured: Captured) -> None:
    """With enough anchors, a value that was read before and has no base KV yet is not computed in its prompt."""
    for number in range(5):
        engine.ask(tokens(number), 4, hints(number))
    engine.reset()
    neighbour = engine.add(PLAIN[0], 60)
    engine.run(until=lambda: bool(engine.scheduler.running))
    other_role = prompt(len(PARTS[0]), 77) + tokens(6)[len(PARTS[0]) :]
    stranger = engine.add(other_role, 1, hints(6, agent="stranger"))
    reader = engine.add(tokens(6), 4, hints(6))
    engine.run()
    assert receipt(engine.finished[stranger])["tokens"]["translated"] == 0
    assert receipt(engine.finished[reader])["tokens"]["translated"] > 200
    assert len(captured.bases) >= 2 and neighbour in engine.finished
