"""Base prefills that vLLM's scheduler computes by itself: with the KV that Transformers computes, beside any load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kedge.kv.segment import KVSegment
from tests.integrations.vllm.conftest import SCHEDULING, Driver, prompt, receipt
from tests.integrations.vllm.lane_prompts import PARTS, PLAIN, difference, hints, lane_engine, reference, tokens

EXACT = 1e-4
BUDGET = 64


@pytest.fixture(scope="module", params=SCHEDULING, ids=["sync", "async"])
def engine(tiny_llama: Path, stock_answers: object, request: pytest.FixtureRequest) -> Iterator[Driver]:  # noqa: ARG001 - first
    with lane_engine(tiny_llama, asynchronous=request.param, is_taught=False, max_num_batched_tokens=BUDGET) as built:
        yield built


@pytest.fixture(autouse=True)
def nothing_is_left(engine: Driver) -> Iterator[None]:
    """Every test begins and ends with an idle engine that has learned nothing."""
    engine.reset()
    engine.worker._learner.clear()
    yield
    engine.run()
    engine.ask(prompt(40, 9), 1)
    assert not engine.side.translations.lanes.jobs
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
    assert not engine.scheduler.deferred_frees


class Captured:
    """The base KV that workers cut out of base prefills."""

    def __init__(self, engine: Driver, patched: pytest.MonkeyPatch) -> None:
        self.prompts: list[tuple[list[int], KVSegment]] = []
        learner = engine.worker._learner
        capture = learner.capture

        def capturing(order: Any) -> None:
            if (order.request.namespace, order.request.tokens) in learner._needs:
                table = learner.pages.table(order.blocks)
                kv = learner.pages.read(table, 0, order.request.prompt_tokens)
                self.prompts.append((list(order.request.tokens), kv))
            capture(order)

        patched.setattr(learner, "capture", capturing)


def test_base_kv_is_what_transformers_computes_in_pieces(
    engine: Driver, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = Captured(engine, monkeypatch)
    engine.ask(tokens(0), 4, hints(0))
    assert len(captured.prompts) == 3, "of the template and of two values"
    assert any(len(one) > BUDGET for one, _ in captured.prompts)
    for one, kv in captured.prompts:
        expected, _ = reference(tiny_llama).dense(one)
        assert difference(kv, expected) < EXACT


def test_an_engine_learns_without_any_client(engine: Driver) -> None:
    for number in range(5):
        engine.ask(tokens(number), 4, hints(number))
    engine.ask(tokens(5), 1, hints(5, agent="stranger"))
    engine.reset()
    assert receipt(engine.ask(tokens(5), 4, hints(5)))["tokens"]["translated"] > 200


def test_aborts_and_many_clients_leave_nothing(engine: Driver, stock_answers: dict[Any, list[int]]) -> None:
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


def test_a_busy_engine_computes_base_kv_before_the_prompts_that_read_it(
    engine: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With enough anchors, a value that was read before and has no base KV yet is not computed in its prompt."""
    captured = Captured(engine, monkeypatch)
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
    assert len(captured.prompts) >= 2 and neighbour in engine.finished
