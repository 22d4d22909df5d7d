"""Drawing tokens, and text as it comes."""

from __future__ import annotations

import pytest
import torch

from kedge.engine.local.sampler import Sampler
from kedge.engine.local.text import TextStream
from kedge.types import SamplingParams
from tests.engine.local.conftest import tiny_tokenizer


def test_temperature_zero_is_greedy() -> None:
    assert Sampler(SamplingParams())(torch.tensor([0.1, 3.0, 2.9])) == 1


def test_a_seed_repeats_exactly_and_another_one_does_not() -> None:
    logits = torch.zeros(1000)
    draws = [[Sampler(SamplingParams(temperature=1.0, seed=seed))(logits) for _ in range(3)] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_nucleus_keeps_the_fewest_tokens_that_reach_top_p() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, top_p=0.6, seed=0))
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    drawn = [sampler(logits) for _ in range(300)]
    assert set(drawn) == {0, 1}
    assert 0.5 < drawn.count(0) / 300 < 0.75


@pytest.mark.parametrize("stop", [("END",), ("xEND", "END"), ("END", "no")])
def test_a_stop_string_is_cut_out_wherever_tokens_split_it(stop: tuple[str, ...]) -> None:
    tokenizer = tiny_tokenizer()
    stream = TextStream(tokenizer, stop)
    out = "".join(stream.push(token) for token in tokenizer.encode("so far EN so good END gone") if not stream.stopped)
    assert stream.stopped
    assert out == stream.text == "so far EN so good "


def test_characters_of_several_tokens_come_whole() -> None:
    tokenizer = tiny_tokenizer()
    stream = TextStream(tokenizer, ())
    pieces = [stream.push(token) for token in tokenizer.encode("ein ∆ und ü")]
    assert "".join(pieces) == "ein ∆ und ü"
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
