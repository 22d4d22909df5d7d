"""Drawing the tokens of a batch, each row as if it were alone, answers that are forced, and text as it comes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from kedge.engine.common.stream import TextStream
from kedge.engine.local.engine import LocalEngine
from kedge.engine.local.learning import Learning
from kedge.engine.local.sampler import Draw, ForcedAnswer, Sampler, draw_tokens
from kedge.engine.local.sequence import RequestSequence
from kedge.settings import AnchorSettings
from kedge.types import Completion, FinishReason, GenerateRequest, ReuseMode, SamplingParams, TokenLogprob, Tokens
from tests.engine.local.conftest import engine_of, tiny_model, tiny_tokenizer
from tests.engine.local.stepping import ASKED, Stepped, prompt_of
from tests.engine.local.test_scheduler import ROOM, STRANGER, call
from tests.engine.local.test_translation import OPEN, request, tokens

# a batch --------------------------------------------------------------------------------------------------------------

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.3, "seed": 2},
    {"temperature": 1.0, "top_p": 0.5, "seed": 3},
    {"temperature": 5.0, "top_p": 0.9, "seed": 1},
    {"temperature": 1e-5, "seed": 4},
    {"temperature": 1.0, "top_p": 1e-46, "seed": 5},
    {"temperature": 1e30, "seed": 6},
    {"presence_penalty": 2.0},
    {"repetition_penalty": 3.0, "temperature": 1.0, "top_k": 2, "seed": 7},
]
"""Ways of drawing: greedy, plain, from a nucleus, at the ends of what floats can say, and by counts of one's own"""


def sampler_of(draw: Draw | None = None, **params: Any) -> Sampler:
    return Sampler(SamplingParams(**params), draw)


def logits_of(rows: int, vocab: int = 50, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def test_a_batch_draws_what_each_row_draws_alone() -> None:
    batch, alone = ([sampler_of(**kind) for kind in KINDS] for _ in range(2))
    for step in range(50):
        logits = logits_of(len(KINDS), seed=step)
        turned = [(row + step) % len(KINDS) for row in range(len(KINDS))]  # wherever it is in the batch
        drawn = draw_tokens(logits[turned], [batch[row] for row in turned])
        assert drawn == [alone[row](logits[row]) for row in turned]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_come_as_often_as_the_model_says(dtype: torch.dtype) -> None:
    """Within five standard deviations of each token's count, for every row of a batch."""
    many, logits = 3000, logits_of(4, vocab=12).to(dtype)
    temperatures = (0.7, 1.0, 2.0, 1e30)
    samplers = [sampler_of(temperature=one, seed=at) for at, one in enumerate(temperatures)]
    counts = torch.zeros(4, 12)
    for _ in range(many):
        for row, token in enumerate(draw_tokens(logits, samplers)):
            assert isinstance(token, int)
            counts[row, token] += 1
    for row, temperature in enumerate(temperatures):
        wanted = torch.softmax(logits[row].double() / temperature, dim=-1)
        bound = 5 * (many * wanted * (1 - wanted)).sqrt() + 1
        assert ((counts[row] - many * wanted).abs() <= bound).all(), temperature


def test_a_nucleus_is_drawn_from_in_its_own_proportions() -> None:
    many, logits = 2000, torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    sampler = sampler_of(temperature=1.0, top_p=0.6, seed=0)
    drawn = [sampler(logits) for _ in range(many)]
    assert set(drawn) == {1, 3}
    share = 0.5 / 0.8
    assert abs(drawn.count(1) - many * share) <= 5 * math.sqrt(many * share * (1 - share))


@pytest.mark.parametrize("top_p", [1e-46, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1e-40, 1e-5, 1.0, 1e30])
def test_extreme_logits_give_tokens(temperature: float, top_p: float) -> None:
    """Tokens that a model rules out have logits of minus infinity; in the last row these are all but the last one."""
    no = -math.inf
    rows = torch.tensor([[3e38, -3e38, 0.0, no], [-3e38, -3e38, -3e38, no], [0.0, no, 5.0, -1.0], [no, no, no, 0.0]])
    samplers = [sampler_of(temperature=temperature, top_p=top_p, seed=at) for at in range(4)]
    for _ in range(30):
        drawn = draw_tokens(rows, samplers)
        assert all(isinstance(token, int) for token in drawn)
        assert all(math.isfinite(rows[row, token]) for row, token in enumerate(drawn))  # type: ignore[index]
        if temperature < 1 or (temperature, top_p) == (1.0, 1e-46):
            assert all(rows[row, token] == rows[row].max() for row, token in enumerate(drawn)), "next to zero: greedy"


# rows in trouble ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("bad", [[math.nan], [math.inf], [-math.inf] * 50, [math.nan] * 50, [1.0, math.inf, math.nan]])
def test_logits_that_are_not_finite_are_an_error_of_their_row_only(kind: dict[str, Any], bad: list[float]) -> None:
    logits = logits_of(3)
    beside = [sampler_of(temperature=1.0, seed=7), sampler_of()]
    alone = [sampler_of(temperature=1.0, seed=7)(logits[0]), int(logits[2].argmax())]
    logits[1, : len(bad)] = torch.tensor(bad)
    before, error, after = draw_tokens(logits, [beside[0], sampler_of(**kind), beside[1]])
    assert isinstance(error, ArithmeticError)
    assert [before, after] == alone


ERRORS: list[Any] = [RuntimeError("a fault"), MemoryError(), StopIteration()]
NO_TOKENS: list[Any] = [-1, 50, 2**70, 1.0, math.nan, True, None, "1", (), torch.tensor(3)]


@pytest.mark.parametrize("given", [*ERRORS, *NO_TOKENS], ids=repr)
def test_a_draw_that_raises_or_gives_no_token_is_an_error_of_its_row_only(given: Any) -> None:
    def draw(_: Tensor) -> Any:
        if isinstance(given, Exception):
            raise given
        return given

    logits = logits_of(3)
    first, error, last = draw_tokens(logits, [sampler_of(), sampler_of(draw), sampler_of()])
    assert (first, last) == (int(logits[0].argmax()), int(logits[2].argmax()))
    assert error is given if isinstance(given, Exception) else isinstance(error, ValueError)
    with pytest.raises(type(error)):
        sampler_of(draw)(logits[1])


def test_a_draw_sees_its_own_logits_whatever_they_are_and_has_the_last_word() -> None:
    logits, seen = logits_of(2), []

    def draw(row: Tensor) -> int:
        seen.append(row.clone())
        return 49

    logits[1, 3] = math.nan
    assert draw_tokens(logits, [sampler_of(), sampler_of(draw, temperature=1.0)]) == [int(logits[0].argmax()), 49]
    torch.testing.assert_close(seen, [logits[1]], rtol=0, atol=0, equal_nan=True)


# text -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [("END",), ("xEND", "END"), ("END", "no")])
def test_a_stop_string_is_cut_out_wherever_tokens_split_it(stop: tuple[str, ...]) -> None:
    tokenizer = tiny_tokenizer()
    stream = TextStream(tokenizer, stop)
    out = "".join(stream.push(token) for token in tokenizer.encode("so far EN so good END gone") if not stream.stopped)
    assert stream.stopped
    assert out == stream.text == "so far EN so good "


# penalties and other cuts ---------------------------------------------------------------------------------------------

LOGITS = torch.linspace(3.0, -3.0, 12)


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        ({"top_k": 3}, [TopKLogitsWarper(3)]),
        ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
        ({"top_k": 4, "top_p": 0.7}, [TopKLogitsWarper(4), TopPLogitsWarper(0.7)]),
        ({"min_p": 0.1, "top_k": 5, "top_p": 0.8}, [MinPLogitsWarper(0.1), TopKLogitsWarper(5), TopPLogitsWarper(0.8)]),
    ],
)
def test_the_tokens_that_are_drawn_from_are_those_of_transformers(params: dict[str, Any], warpers: list[Any]) -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, seed=0, **params))
    scores = LOGITS[None]
    for warper in warpers:
        scores = warper(None, scores)
    assert {sampler(LOGITS.clone()) for _ in range(600)} == set(scores[0].isfinite().nonzero().flatten().tolist())


def test_repeated_tokens_are_as_likely_as_with_transformers() -> None:
    prompt = (0, 11, 11)
    sampler = Sampler(SamplingParams(repetition_penalty=1.7), prompt=prompt)
    said: list[int] = []
    for _ in range(6):
        scores = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[*prompt, *said]]), LOGITS[None].clone())
        said.append(sampler(LOGITS.clone()))
        assert said[-1] == int(scores.argmax())
    assert len(set(said)) > 2


def test_presence_and_frequency_count_in_answers_alone() -> None:
    flat = torch.tensor([1.0, 0.9, 0.0])
    assert [Sampler(SamplingParams(presence_penalty=1.0), prompt=(0,))(flat.clone()) for _ in range(3)] == [0, 0, 0]
    once = Sampler(SamplingParams(presence_penalty=0.5))
    assert [once(flat.clone()) for _ in range(4)] == [0, 1, 0, 0]
    each = Sampler(SamplingParams(frequency_penalty=0.5))
    assert [each(flat.clone()) for _ in range(6)] == [0, 1, 0, 1, 0, 2]


# when tokens are told, and those that are forced ----------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_the_first_token_is_told_before_anything_is_kept_of_its_prompt(
    max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, started = list[int](), Learning.started

    def noted(self: Learning, sequence: RequestSequence) -> None:
        told.append(sequence.stream._items.qsize())
        started(self, sequence)

    monkeypatch.setattr(Learning, "started", noted)
    engine = Stepped()
    engine.serve(prompt_of("writer", ASKED, max_tokens=max_tokens))
    assert told == [1]


@pytest.mark.parametrize("batch_tokens", [7, 2048])
def test_readers_find_the_same_of_a_forced_answer_as_of_one_that_is_drawn_step_by_step(batch_tokens: int) -> None:
    """Also where a pass has no room for all of it."""
    answer, receipts = tokens(71, 24), []
    drawn = iter(answer)
    for draw in (lambda _: next(drawn), ForcedAnswer(answer, rows=0)):
        with engine_of(tiny_model("llama"), anchors=AnchorSettings(**OPEN), max_batch_tokens=batch_tokens) as engine:
            written = prompt_of("writer", ASKED, produces="agent_writer@0", max_tokens=24)
            assert engine.submit(written, draw).result(60).tokens == answer
            engine.wait_idle(60)
            receipts.append(engine.submit(prompt_of("reader", ASKED, answer)).result(60).receipt)
    assert receipts[0].spans == receipts[1].spans and receipts[0].translated


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
    engine.step(steps)
    engine.submit(call(STRANGER, 99))
    engine.step()
    assert youngest in engine.core.scheduler.preempted
    engine.rest()
    assert tuple(youngest.response) == answer
    assert_alike(youngest.logprobs.answer, expected.logprobs.answer)
    assert len(youngest.logprobs.answer) == len(answer)
