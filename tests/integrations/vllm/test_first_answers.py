"""Answers that no anchors know, on real vLLM: translated by rotation alone, while the rest is learned from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm.conftest import BLOCK, SCHEDULING, Driver, prompt, receipt
from tests.integrations.vllm.lane_prompts import (
    SETTINGS,
    computed_by_torch,
    difference,
    knowing_nothing,
    learning_engine,
    recorded,
)

EXACT = 1e-4
NEEDED = 4
"""Anchors before a question is translated, by `SETTINGS`"""
HEAD, BETWEEN, END = BLOCK + 9, prompt(40, 2), prompt(30, 3)
QUESTION, ANSWER = 60, 60
QUESTION_AT, ANSWER_AT = 1, 3
"""Their numbers among the segments"""
AT = HEAD + QUESTION + len(BETWEEN)
"""Where the answer begins"""


@pytest.fixture(scope="module", params=SCHEDULING, ids=["sync", "async"])
def engine(tiny_llama: Path, stock_answers: object, request: pytest.FixtureRequest) -> Iterator[Driver]:  # noqa: ARG001 - first
    extra = {**SETTINGS, "planner": {**SETTINGS.get("planner", {}), "move": "unlearned"}}
    with learning_engine(tiny_llama, asynchronous=request.param, extra=extra, max_num_seqs=24) as built:
        yield built


@pytest.fixture(autouse=True)
def engine_that_knows_nothing(engine: Driver) -> Iterator[None]:
    with knowing_nothing(engine):
        yield


def written(engine: Driver, number: int) -> list[int]:
    """The answer of the run's writer."""
    asked = {"workflow": "w", "run": f"r{number}", "agent": "writer", "produces": "agent_writer@0"}
    return engine.answer(prompt(50, 600 + number), ANSWER, asked)


def reads(number: int, answer: list[int], agent: str = "reader") -> tuple[list[int], dict[str, Any]]:
    """A prompt with a question of its own and the run's answer."""
    tokens = [*prompt(HEAD, len(agent)), *prompt(QUESTION, 700 + number), *BETWEEN, *answer, *END]
    segments = [
        {"name": "p0", "length": HEAD},
        {"name": "question", "length": QUESTION, "sample": "question"},
        {"name": "p1", "length": len(BETWEEN)},
        {"name": "answer", "length": len(answer), "sample": "agent_writer@0"},
        {"name": "p2", "length": len(END)},
    ]
    return tokens, {"workflow": "w", "run": f"r{number}", "agent": agent, "segments": segments}


def read(engine: Driver, number: int, agent: str = "reader", **more: Any) -> Any:
    tokens, hints = reads(number, written(engine, number), agent)
    found = engine.ask(tokens, kedge=hints, **more)
    engine.run()
    return found


def test_the_first_reader_of_an_answer_translates_it(
    engine: Driver, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        engine.side.translations.lanes.jobs, "add", lambda *_, **__: None
    )  # they would reuse its blocks
    tokens, hints = reads(0, written(engine, 0))
    with recorded(engine) as recorder:
        found = receipt(engine.ask(tokens, 4, hints))
        assert found["tokens"]["translated"] == ANSWER - 2, found["misses"]
        holes = range(AT + 2), range(AT + ANSWER, len(tokens))
        assert recorder.written is not None
        expected, _ = computed_by_torch(tiny_llama, tokens, recorder.written.slice(0, len(tokens)), holes)
        kv = recorder.read().slice(0, len(tokens))
    assert difference(kv, expected) < EXACT


@pytest.fixture
def seen(engine: Driver, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """What is learned from: the numbers of segments, and whether they count as having no offsets."""
    found: list[tuple[int, bool]] = []
    anchors, _ = engine.worker._learner.learned
    observe = anchors.observe

    def observing(site: Any, sample: Any, real: Any, *more: Any) -> None:
        found.append((site.index, real is sample.base))
        observe(site, sample, real, *more)

    monkeypatch.setattr(anchors, "observe", observing)
    return found


def test_questions_are_learned_from_prompts_with_translated_answers(
    engine: Driver, seen: list[tuple[int, bool]]
) -> None:
    for number in range(NEEDED):
        for agent in ("first", "reader"):  # what the first agent reads, another will: its base KV is computed
            assert receipt(read(engine, number, agent))["tokens"]["translated"] >= ANSWER - 2
    text = QUESTION_AT + 1  # of the template, as the first agent has left it
    learned = {(QUESTION_AT, False), (text, False), (ANSWER_AT, True)}
    assert set(seen) == learned, "what was moved has no offsets, for all one knows"
    read(engine, NEEDED, "first")
    assert receipt(read(engine, NEEDED))["tokens"]["translated"] > ANSWER + QUESTION // 2


def test_a_prompt_that_ends_with_its_first_token_is_learned_from_by_its_plan(
    engine: Driver, seen: list[tuple[int, bool]]
) -> None:
    """Its end and the capture of its prompt reach the workers in one step."""
    for agent in ("first", "reader"):
        assert receipt(read(engine, 0, agent, count=1))["tokens"]["translated"] == ANSWER - 2
    assert (ANSWER_AT, True) in seen and (ANSWER_AT, False) not in seen
