"""Drawing the tokens of a batch, each row as if it were alone, and text as it comes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from kedge.engine.common.stream import TextStream
from kedge.engine.local.sampler import Draw, Sampler, draw_tokens
from kedge.types import SamplingParams
from tests.engine.local.conftest import tiny_tokenizer

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
]
"""Ways of drawing: greedy, plain, from a nucleus, and at the ends of what floats can say"""


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
    """Tokens that a model rules out have logits of minus infinity."""
    rows = torch.tensor([[3e38, -3e38, 0.0, -math.inf], [-3e38, -3e38, -3e38, -math.inf], [0.0, -math.inf, 5.0, -1.0]])
    samplers = [sampler_of(temperature=temperature, top_p=top_p, seed=at) for at in range(3)]
    for _ in range(30):
        drawn = draw_tokens(rows, samplers)
        assert all(isinstance(token, int) for token in drawn)
        assert all(math.isfinite(rows[row, token]) for row, token in enumerate(drawn))  # type: ignore[index]
        if temperature < 1 or (temperature, top_p) == (1.0, 1e-46):
            assert all(rows[row, token] == rows[row].max() for row, token in enumerate(drawn)), "next to zero: greedy"


def test_the_last_token_can_be_drawn_and_none_behind_it() -> None:
    logits = torch.full((1, 7), -math.inf)
    logits[0, 6] = 0.0
    sampler = sampler_of(temperature=1.0, seed=0)
    assert [draw_tokens(logits, [sampler]) for _ in range(100)] == [[6]] * 100


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


@pytest.mark.parametrize("error", [RuntimeError("a fault"), MemoryError(), StopIteration()], ids=repr)
def test_a_draw_that_raises_is_an_error_of_its_row_only(error: Exception) -> None:
    def raises(_: Tensor) -> int:
        raise error

    logits = logits_of(3)
    drawn = draw_tokens(logits, [sampler_of(), sampler_of(raises), sampler_of()])
    assert drawn == [int(logits[0].argmax()), error, int(logits[2].argmax())]
    with pytest.raises(type(error)):
        sampler_of(raises)(logits[1])


@pytest.mark.parametrize(
    "nonsense", [-1, 50, 2**70, 1.0, math.nan, True, None, "1", (), torch.tensor(3)], ids=lambda one: repr(one)
)
def test_a_draw_that_gives_no_token_is_an_error_of_its_row_only(nonsense: Any) -> None:
    logits = logits_of(3)
    first, error, last = draw_tokens(logits, [sampler_of(), sampler_of(lambda _: nonsense), sampler_of()])
    assert isinstance(error, ValueError)
    assert (first, last) == (int(logits[0].argmax()), int(logits[2].argmax()))


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


def test_requests_beside_each_other_keep_their_own_counts() -> None:
    asked = [{"presence_penalty": 2.0}, {}, {"repetition_penalty": 3.0, "temperature": 1.0, "top_k": 2, "seed": 1}]
    alone = [Sampler(SamplingParams(**one)) for one in asked]
    together = [Sampler(SamplingParams(**one)) for one in asked]
    for _ in range(8):
        assert draw_tokens(LOGITS.repeat(3, 1), together) == [sampler(LOGITS.clone()) for sampler in alone]
