"""Questions on real vLLM whose base KV is that of the first agent's prompt: captured there, moved to other agents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm.conftest import BLOCK, SCHEDULING, Driver, prompt, receipt
from tests.integrations.vllm.lane_prompts import (
    computed_by_torch,
    difference,
    knowing_nothing,
    learning_engine,
    recorded,
)

EXACT = 1e-4
FIRST, READER = 2 * BLOCK + 5, 3 * BLOCK + 9
"""Tokens of their prompts before the question"""
QUESTION, END = 60, prompt(30, 3)
AGAIN = 2
"""First tokens of a moved value that are computed again, by `SETTINGS`"""
MOVED = QUESTION - AGAIN


@pytest.fixture(scope="module", params=SCHEDULING, ids=["sync", "async"])
def engine(tiny_llama: Path, stock_answers: object, request: pytest.FixtureRequest) -> Iterator[Driver]:  # noqa: ARG001 - first
    with learning_engine(tiny_llama, asynchronous=request.param, max_num_seqs=24) as built:
        yield built


@pytest.fixture(autouse=True)
def engine_that_knows_nothing(engine: Driver) -> Iterator[None]:
    with knowing_nothing(engine):
        yield


def reads(
    number: int, agent: str, context: list[int] | None = None, text: list[int] | None = None
) -> tuple[list[int], dict[str, Any]]:
    """A prompt with a question, whose base context is what the prompt of `first` begins with, or `context`; `text` is
    between it and the end.
    """
    first = prompt(FIRST, 5)
    head = first if agent == "first" else prompt(READER, len(agent))
    question = {"name": "question", "length": QUESTION, "sample": "question", "in_context": True}
    segments = [
        {"name": "p0", "length": len(head)},
        {**question, "base_context": first if context is None else context},
        *([{"name": "p1", "length": len(text)}] if text else []),
        {"name": "p2" if text else "p1", "length": len(END)},
    ]
    tokens = [*head, *prompt(QUESTION, 700 + number), *(text or []), *END]
    return tokens, {"workflow": "w", "run": f"r{number}", "agent": agent, "segments": segments}


def asked(engine: Driver, number: int, agent: str) -> dict[str, Any]:
    tokens, hints = reads(number, agent)
    found = receipt(engine.ask(tokens, 4, hints))
    engine.run()
    return found


def test_the_second_agent_has_the_kv_that_the_first_one_computed(
    engine: Driver, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.side.translations.lanes.jobs, "add", lambda *_, **__: pytest.fail("it is there already"))
    assert asked(engine, 0, "first")["tokens"]["translated"] == 0
    tokens, hints = reads(0, "reader")
    with recorded(engine) as recorder:
        found = receipt(engine.ask(tokens, 4, hints))
        assert found["tokens"]["translated"] == MOVED, found["misses"]
        holes = range(READER + AGAIN), range(READER + QUESTION, len(tokens))
        assert recorder.written is not None
        expected, _ = computed_by_torch(tiny_llama, tokens, recorder.written.slice(0, len(tokens)), holes)
        kv = recorder.read().slice(0, len(tokens))
    assert difference(kv, expected) < EXACT
    first, _ = reads(0, "first")
    dense, _ = computed_by_torch(tiny_llama, first, kv.slice(0, len(first)), (range(len(first)),))
    moved, read = kv.slice(READER + AGAIN, READER + QUESTION), dense.slice(FIRST + AGAIN, FIRST + QUESTION)
    assert float((moved.values - read.values).abs().max()) < EXACT
    assert float((moved.keys - read.keys).abs().max()) < EXACT, "both unrotated"


def test_text_behind_the_question_is_moved_from_the_prompt_that_computed_it_first(engine: Driver) -> None:
    text, kept = prompt(20, 11), []
    for agent in ("reader", "reader", "another"):
        tokens, hints = reads(4, agent, text=text)
        with recorded(engine) as recorder:
            found = receipt(engine.ask(tokens, 4, hints))
            kept.append(recorder.read().slice(0, len(tokens)))
        engine.run()
    assert found["tokens"]["translated"] == MOVED + len(text) - AGAIN, found["misses"]
    place = slice(READER + QUESTION + AGAIN, READER + QUESTION + len(text))
    assert float((kept[2].keys[:, place] - kept[1].keys[:, place]).abs().max()) < EXACT
    assert float((kept[2].values[:, place] - kept[1].values[:, place]).abs().max()) < EXACT


def test_without_the_first_agent_its_prompt_is_computed_for_the_others(engine: Driver) -> None:
    asked(engine, 1, "reader")
    assert asked(engine, 1, "another")["tokens"]["translated"] == MOVED


@pytest.mark.parametrize("context", [[], [7] * 5000, [10**9]], ids=["empty", "too long", "no token"])
def test_a_base_context_that_no_model_can_compute_only_computes_the_question(
    engine: Driver, context: list[int]
) -> None:
    for agent in ("first", "reader", "another"):
        tokens, hints = reads(2, agent, context)
        found = engine.ask(tokens, 4, hints)
        engine.run()
        assert len(found.outputs[0].token_ids) == 4
    assert asked(engine, 3, "first")["tokens"]["translated"] == 0
    translated = asked(engine, 3, "reader")["tokens"]["translated"]
    assert translated in (MOVED, MOVED + READER % BLOCK), "the others go on, be it with the end of the reader's prefix"
