"""KV that is moved by rotation before anything was learned: answers from their writers, and questions from the prompt
of the first agent who reads them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kedge.kv.segment import KVSegment
from tests.integrations.vllm.conftest import BLOCK, SCHEDULING, Driver, prompt, receipt
from tests.integrations.vllm.lane_prompts import SETTINGS, lane_engine, leaving_nothing, recorded
from tests.transformers_over_kv import difference, reference

EXACT = 1e-4
NEEDED, AGAIN = 4, 2
"""Anchors before a question is translated, and first tokens of a moved value that are computed again, by `SETTINGS`"""
QUESTION, ANSWER, END = 60, 60, prompt(30, 3)
MOVED, KEPT = QUESTION - AGAIN, ANSWER - 1
"""Tokens that are moved of a question, and of an answer that are kept: all but the one drawn last"""
HEAD, BETWEEN = BLOCK + 9, prompt(40, 2)
"""Of prompts that read a question and an answer"""
ANSWER_BEGINS = HEAD + QUESTION + len(BETWEEN)
FIRST, READER = 2 * BLOCK + 5, 3 * BLOCK + 9
"""Tokens before the question, of prompts that read one alone"""


def moves(which: str) -> pytest.MarkDecorator:
    """Run a test on engines that move so: values that nothing was learned of, or always."""
    return pytest.mark.parametrize("move", [which], scope="module")


@pytest.fixture(scope="module", params=SCHEDULING, ids=["sync", "async"])
def running(tiny_llama: Path, request: pytest.FixtureRequest, move: str) -> Iterator[Driver]:
    extra = {**SETTINGS, "planner": {**SETTINGS["planner"], "move": move}}
    with lane_engine(tiny_llama, asynchronous=request.param, is_taught=False, extra=extra) as built:
        built.worker._budget._is_timed = False  # a piece is learned in each step, however slow the machine is
        yield built


@pytest.fixture
def engine(running: Driver) -> Iterator[Driver]:
    """An engine without caches, anchors and base KV."""
    with leaving_nothing(running):
        yield running


def ask(engine: Driver, tokens: list[int], hints: dict[str, Any], count: int = 4) -> dict[str, Any]:
    """The receipt of a call, after which all has been learned."""
    found = receipt(engine.ask(tokens, count, hints))
    engine.run()
    return found


def moved(engine: Driver, model: Path, tokens: list[int], hints: dict[str, Any], span: range) -> KVSegment:
    """The KV of a prompt of which this span is moved; what is not is checked."""
    with recorded(engine) as recorder:
        found = receipt(engine.ask(tokens, 4, hints))
        assert found["tokens"]["translated"] == len(span), found["misses"]
        holes = range(span.start), range(span.stop, len(tokens))
        expected, _ = reference(model).compute(tokens, recorder.written.slice(0, len(tokens)), holes)
        kv = recorder.read().slice(0, len(tokens))
    assert difference(kv, expected) < EXACT
    return kv


# answers --------------------------------------------------------------------------------------------------------------


def reads_answer(engine: Driver, number: int, agent: str = "reader") -> tuple[list[int], dict[str, Any]]:
    """A prompt with a question of its own and the answer that the run's writer gives."""
    run = {"workflow": "w", "run": f"r{number}"}
    answer = engine.answer(prompt(50, 600 + number), ANSWER, {**run, "agent": "writer", "produces": "agent_writer@0"})
    tokens = [*prompt(HEAD, len(agent)), *prompt(QUESTION, 700 + number), *BETWEEN, *answer, *END]
    segments = [
        {"name": "p0", "length": HEAD},
        {"name": "question", "length": QUESTION, "sample": "question"},
        {"name": "p1", "length": len(BETWEEN)},
        {"name": "answer", "length": len(answer), "sample": "agent_writer@0"},
        {"name": "p2", "length": len(END)},
    ]
    return tokens, {**run, "agent": agent, "segments": segments}


@moves("unlearned")
def test_the_first_reader_of_an_answer_translates_it(
    engine: Driver, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = engine.side.translations.lanes.prefills
    monkeypatch.setattr(jobs, "add", lambda *_, **__: None)  # they would reuse its blocks
    span = range(ANSWER_BEGINS + AGAIN, ANSWER_BEGINS + KEPT)
    moved(engine, tiny_llama, *reads_answer(engine, 0), span)


@pytest.fixture
def seen(engine: Driver, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """What is learned from: the numbers of segments, and whether they count as having no offsets."""
    found: list[tuple[int, bool]] = []
    anchors = engine.worker._learner.anchors
    observe = anchors.observe

    def observing(site: Any, sample: Any, real: Any, *more: Any) -> None:
        found.append((site.index, real is sample.base))
        observe(site, sample, real, *more)

    monkeypatch.setattr(anchors, "observe", observing)
    return found


QUESTION_AT, TEXT_AT, ANSWER_AT = 1, 2, 3
"""Numbers of segments"""


@moves("unlearned")
def test_questions_are_learned_from_prompts_with_translated_answers(
    engine: Driver, seen: list[tuple[int, bool]]
) -> None:
    for number in range(NEEDED):
        for agent in ("first", "reader"):  # what the first agent reads, another will: its base KV is computed
            assert ask(engine, *reads_answer(engine, number, agent))["tokens"]["translated"] >= KEPT - AGAIN
    learned = {(QUESTION_AT, False), (TEXT_AT, False), (ANSWER_AT, True)}
    assert set(seen) == learned, "what was moved has no offsets, for all one knows"
    ask(engine, *reads_answer(engine, NEEDED, "first"))
    assert ask(engine, *reads_answer(engine, NEEDED))["tokens"]["translated"] > KEPT + QUESTION // 2


@moves("unlearned")
def test_a_prompt_that_ends_with_its_first_token_is_learned_from_by_its_plan(
    engine: Driver, seen: list[tuple[int, bool]]
) -> None:
    """Its end and the capture of its prompt reach the workers in one step."""
    for agent in ("first", "reader"):
        found = ask(engine, *reads_answer(engine, 0, agent), count=1)
        assert found["tokens"]["translated"] == KEPT - AGAIN
    assert (ANSWER_AT, True) in seen and (ANSWER_AT, False) not in seen


# questions ------------------------------------------------------------------------------------------------------------


def reads_question(
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


@moves("always")
def test_the_second_agent_has_the_kv_that_the_first_one_computed(
    engine: Driver, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = engine.side.translations.lanes.prefills
    monkeypatch.setattr(jobs, "add", lambda *_, **__: pytest.fail("it is there already"))
    asked = reads_question(0, "first")
    assert ask(engine, *asked)["tokens"]["translated"] == 0
    kv = moved(engine, tiny_llama, *reads_question(0, "reader"), range(READER + AGAIN, READER + QUESTION))
    dense, _ = reference(tiny_llama).dense(asked[0])
    there, read = kv.slice(READER + AGAIN, READER + QUESTION), dense.slice(FIRST + AGAIN, FIRST + QUESTION)
    assert difference(there, read) < EXACT, "keys are unrotated"


@moves("always")
def test_text_behind_the_question_is_moved_from_the_prompt_that_computed_it_first(engine: Driver) -> None:
    text, kept = prompt(20, 11), []
    for agent in ("reader", "reader", "another"):
        tokens, hints = reads_question(4, agent, text=text)
        with recorded(engine) as recorder:
            found = receipt(engine.ask(tokens, 4, hints))
            kept.append(recorder.read().slice(0, len(tokens)))
        engine.run()
    assert found["tokens"]["translated"] == MOVED + len(text) - AGAIN, found["misses"]
    place = range(READER + QUESTION + AGAIN, READER + QUESTION + len(text))
    assert difference(kept[2], kept[1], (place,)) < EXACT


@moves("always")
def test_without_the_first_agent_its_prompt_is_computed_for_the_others(engine: Driver) -> None:
    ask(engine, *reads_question(1, "reader"))
    assert ask(engine, *reads_question(1, "another"))["tokens"]["translated"] == MOVED


@moves("always")
@pytest.mark.parametrize("context", [[], [7] * 5000, [10**9]], ids=["empty", "too long", "no token"])
def test_a_base_context_that_no_model_can_compute_only_computes_the_question(
    engine: Driver, context: list[int]
) -> None:
    for agent in ("first", "reader", "another"):
        tokens, hints = reads_question(2, agent, context)
        found = engine.ask(tokens, 4, hints)
        engine.run()
        assert len(found.outputs[0].token_ids) == 4
    assert ask(engine, *reads_question(3, "first"))["tokens"]["translated"] == 0
    translated = ask(engine, *reads_question(3, "reader"))["tokens"]["translated"]
    assert translated in (MOVED, MOVED + READER % BLOCK), "the others go on, be it with the end of the reader's prefix"
