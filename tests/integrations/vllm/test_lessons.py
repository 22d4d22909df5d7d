"""Crowds of runs that begin in step, on real vLLM: as many prompts of an agent as it needs are computed, and the others
are translated.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kedge.integrations.vllm.plugin.translations import MAX_LESSON_WAITS  # noqa: E402
from tests.integrations.vllm.conftest import SCHEDULING, Driver, prompt, receipt  # noqa: E402
from tests.integrations.vllm.lane_prompts import PLAIN, SETTINGS, hints, learning_engine, tokens  # noqa: E402

NEEDED = 4
"""Anchors before anything is translated, by `SETTINGS`"""
CROWD = 12


@pytest.fixture(scope="module", params=SCHEDULING, ids=["sync", "async"])
def engine(tiny_llama: Path, stock_answers: object, request: pytest.FixtureRequest) -> Iterator[Driver]:  # noqa: ARG001 - first
    extra, room = {**SETTINGS, "max_captures": CROWD}, {"max_num_seqs": 48, "max_num_batched_tokens": 512}
    with learning_engine(tiny_llama, asynchronous=request.param, extra=extra, **room) as built:
        yield built


@pytest.fixture(autouse=True)
def engine_that_knows_nothing(engine: Driver) -> Iterator[None]:
    engine.reset()
    engine.worker._learner.clear()
    yield
    engine.run()
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1


def asked(agent: str, number: int) -> list[int]:
    """The prompt of an agent in a run, each with words of its own."""
    own = tokens(0)
    return [
        *prompt(41, sum(map(ord, agent))),
        *prompt(60, 400 + number),
        *own[101:171],
        *prompt(50, 500 + number),
        *own[221:],
    ]


def crowd(engine: Driver, agent: str, count: int = 3) -> list[str]:
    runs = range(CROWD)
    return [engine.add(asked(agent, one), count, hints(one, agent=agent, run=f"{agent}-{one}")) for one in runs]


def translated(engine: Driver, names: list[str]) -> int:
    return sum(receipt(engine.finished[name])["tokens"]["translated"] > 0 for name in names if name in engine.finished)


def test_of_a_crowd_only_the_needed_prompts_are_computed(engine: Driver) -> None:
    crowd(engine, "first")  # another agent has read the values: their base KV is worth it
    engine.run()
    names = crowd(engine, "second")
    engine.run()
    assert translated(engine, names) == CROWD - NEEDED


def test_others_run_while_requests_wait_for_lessons(engine: Driver, stock_answers: dict[object, list[int]]) -> None:
    crowd(engine, "first")
    engine.run()
    names, plain = crowd(engine, "third"), [engine.add(one, 40) for one in PLAIN]
    engine.run()
    assert [list(engine.finished[name].outputs[0].token_ids) for name in plain] == [
        stock_answers["plain", at] for at in range(len(PLAIN))
    ]
    assert translated(engine, names) == CROWD - NEEDED


def test_lessons_that_are_aborted_are_replaced(engine: Driver) -> None:
    crowd(engine, "first")
    engine.run()
    names = crowd(engine, "fourth", 60)
    lessons = engine.side.translations._lessons
    engine.run(until=lambda: bool(lessons.awaited))
    engine.engine.abort_request(names[:2])
    engine.run()
    assert len(set(names) & engine.finished.keys()) == CROWD - 2
    assert translated(engine, names[2:]) >= CROWD - 2 - NEEDED
    assert not lessons.awaited


def test_lessons_that_never_come_hold_a_crowd_up_for_so_long_and_no_longer(
    engine: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = engine.worker._learner
    monkeypatch.setattr(type(learner), "learn", lambda *_: False)
    monkeypatch.setattr(type(learner), "is_learning", property(lambda _: False))
    names = crowd(engine, "fifth")
    candidates = engine.side.translations._candidates
    waiting = [*candidates.values()]
    engine.run()
    assert set(names) <= engine.finished.keys() and translated(engine, names) == 0
    assert max(one.lesson_waits for one in waiting) == MAX_LESSON_WAITS + 1
