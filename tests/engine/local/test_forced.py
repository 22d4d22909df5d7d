"""Tokens of an answer: when they are told, and those that are forced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from kedge.engine.local.engine import LocalEngine
from kedge.engine.local.learning import Learning
from kedge.engine.local.sampler import ForcedAnswer
from kedge.engine.local.sequence import RequestSequence
from kedge.settings import AnchorSettings
from kedge.types import Completion, FinishReason, GenerateRequest, ReuseMode, Source, TokenLogprob, Tokens
from tests.engine.local.conftest import engine_of, tiny_model
from tests.engine.local.stage import ASKED, prompt_of
from tests.engine.local.stepping import Stepped
from tests.engine.local.test_fairness import ROOM, STRANGER, call
from tests.engine.local.test_translation import OPEN, request, tokens


def opened(**settings: object) -> LocalEngine:
    return engine_of(tiny_model("llama"), anchors=AnchorSettings(**OPEN), planner={"by_cost": False}, **settings)


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_the_first_token_is_told_before_anything_is_kept_of_its_prompt(
    max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    tell, started = RequestSequence.tell, Learning.started

    def noted_tell(self: RequestSequence, text: str, tokens: Tokens = (), *more: Any) -> None:
        happened.extend(["told"] * len(tokens))
        tell(self, text, tokens, *more)

    def noted_start(self: Learning, sequence: RequestSequence) -> None:
        happened.append("started")
        started(self, sequence)

    monkeypatch.setattr(RequestSequence, "tell", noted_tell)
    monkeypatch.setattr(Learning, "started", noted_start)
    with opened() as engine:
        done = engine.submit(prompt_of("writer", ASKED, max_tokens=max_tokens, ignore_eos=True)).result(60)
    assert len(done.tokens) == max_tokens
    assert happened == ["told", "started", *["told"] * (max_tokens - 1)]


@pytest.mark.parametrize("batch_tokens", [7, 2048])
def test_readers_find_the_same_of_a_forced_answer_as_of_one_that_is_drawn_step_by_step(batch_tokens: int) -> None:
    """Also where a pass has no room for all of it."""
    answer, spans = tokens(71, 24), []
    drawn = iter(answer)
    for draw in (lambda _: next(drawn), ForcedAnswer(answer, rows=0)):
        with opened(max_batch_tokens=batch_tokens) as engine:
            written = prompt_of("writer", ASKED, produces="agent_writer@0", max_tokens=24)
            assert engine.submit(written, draw).result(60).tokens == answer
            engine.wait_idle(60)
            spans.append(engine.submit(prompt_of("reader", ASKED, answer)).result(60).receipt.spans)
    assert spans[0] == spans[1] and any(span.source is Source.TRANSLATED for span in spans[0])


SIZE = 20
CALLED = replace(request(tokens(70, 27), reuse=ReuseMode.OFF, max_tokens=SIZE), logprobs=20)


def forced(asked: GenerateRequest, answer: Tokens) -> GenerateRequest:
    sampling = replace(asked.sampling, temperature=0.0, seed=None, max_tokens=len(answer))
    return replace(asked, request_id="forced", sampling=sampling, forced=answer)


def assert_alike(found: Sequence[TokenLogprob], expected: Sequence[TokenLogprob]) -> None:
    assert [one.token for one in found] == [one.token for one in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        assert [value for _, value in mine.top] == pytest.approx([value for _, value in theirs.top], abs=1e-3)


@pytest.fixture(scope="module", params=[7, 2048], ids=["in small passes", "in one pass"])
def engine(request: pytest.FixtureRequest) -> Iterator[LocalEngine]:
    with engine_of(tiny_model("llama"), max_batch_tokens=request.param) as built:
        yield built


def ask(engine: LocalEngine, asked: GenerateRequest) -> Completion:
    return engine.submit(asked).result(60)


@pytest.mark.parametrize("reuse", list(ReuseMode))
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_it_is_what_was_decoded_step_by_step(engine: LocalEngine, temperature: float, reuse: ReuseMode) -> None:
    sampling = replace(CALLED.sampling, temperature=temperature, seed=5 if temperature else None)
    slow = ask(engine, replace(CALLED, sampling=sampling, reuse=reuse, request_id="slow"))
    quick = ask(engine, forced(replace(CALLED, reuse=reuse), slow.tokens))
    assert quick.tokens == slow.tokens and quick.text == slow.text and quick.finish_reason is FinishReason.LENGTH
    assert len(quick.logprobs) == SIZE
    assert_alike(quick.logprobs, slow.logprobs)


def test_what_the_model_would_never_say_has_the_log_probabilities_of_its_prompt(engine: LocalEngine) -> None:
    answer = tokens(71, SIZE)
    done, kept = ask(engine, forced(CALLED, answer)), ForcedAnswer(answer, rows=SIZE - 3)
    assert engine.submit(replace(CALLED, request_id="kept"), kept).result(60).tokens == answer
    with torch.inference_mode():
        logits = tiny_model("llama")(torch.tensor([CALLED.tokens + answer])).logits[0, len(CALLED.tokens) - 1 : -1]
    assert sorted(kept.logits) == list(range(SIZE - 3))
    assert all(torch.allclose(row, logits[at], atol=1e-4) for at, row in kept.logits.items())
    expected = logits.double().log_softmax(-1)[range(SIZE), answer].tolist()
    assert done.tokens == answer and [one.token for one in done.logprobs] == [*answer]
    assert [one.logprob for one in done.logprobs] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("size, max_tokens", [(1, 1), (1, 9), (5, 3), (5, 5), (5, 9)])
def test_there_are_as_many_log_probabilities_as_tokens(engine: LocalEngine, size: int, max_tokens: int) -> None:
    asked = forced(CALLED, tokens(72, size))
    done = ask(engine, replace(asked, sampling=replace(asked.sampling, max_tokens=max_tokens)))
    assert done.tokens == asked.forced[: min(size, max_tokens)]
    assert tuple(one.token for one in done.logprobs) == done.tokens
    silent = ask(engine, replace(asked, logprobs=None))
    assert silent.tokens == asked.forced and silent.logprobs == ()


def test_one_ends_at_no_end_of_text_and_leaves_its_neighbours_alone(engine: LocalEngine) -> None:
    end = 257
    alone = ask(engine, replace(CALLED, request_id="alone"))
    mine = replace(forced(CALLED, (40, end, 41, 42)), request_id="mine")
    streams = [engine.submit(one) for one in (replace(CALLED, request_id="beside"), mine)]
    beside, done = (stream.result(60) for stream in streams)
    assert done.tokens == (40, end, 41, 42) and len(done.logprobs) == 4
    assert beside.tokens == alone.tokens
    assert_alike(beside.logprobs, alone.logprobs)


@pytest.mark.parametrize("steps", [0, 3])
def test_one_that_steps_aside_is_read_once(steps: int) -> None:
    """It reads its prompt; once it has been told its answer it keeps its blocks."""
    answer = tokens(74, 90)

    def sequence_of(engine: Stepped) -> RequestSequence:
        asked = replace(call(seed=3, size=200, answer=90), logprobs=2)
        one = engine.sequence(asked)
        one.sampler.draw = ForcedAnswer(answer, rows=0)
        return one

    lone = Stepped()
    expected = lone.queue(sequence_of(lone))
    lone.rest()
    engine = Stepped(**{**ROOM, "kv_memory": "36 blocks"})
    for seed in (0, 1):
        engine.submit(call(seed=seed, size=60, answer=60))
    youngest = engine.queue(sequence_of(engine))
    engine.until(lambda: youngest.admitted)
    for _ in range(steps):
        engine.step()
    engine.submit(call(STRANGER, 99))
    engine.step()
    assert youngest in engine.core.scheduler.preempted
    engine.rest()
    assert tuple(youngest.response) == answer
    assert_alike(youngest.logprobs.answer, expected.logprobs.answer)
    assert len(youngest.logprobs.answer) == len(answer)
