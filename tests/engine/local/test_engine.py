"""The embedded engine against Transformers itself."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import PreTrainedModel

from kedge.engine.local.attention.paged import Batch
from kedge.engine.local.build import EngineParts
from kedge.engine.local.model.runner import ModelRunner
from kedge.errors import ForwardFailed
from kedge.types import GenerateRequest, ReuseMode, SamplingParams, Segment
from tests.engine.local.conftest import FAMILIES, engine_of, tiny_model


def prompt(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(256) for _ in range(length))


def request(tokens: tuple[int, ...], reuse: ReuseMode = ReuseMode.EXACT, **sampling: object) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **sampling})
    return GenerateRequest((Segment(tokens, "p0"),), params, reuse)


def greedy(model: PreTrainedModel, tokens: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Transformers' own greedy continuation."""
    model.set_attn_implementation("eager")
    ids = torch.tensor([tokens], device=model.device)
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    model.set_attn_implementation("kedge")
    return tuple(out[0, len(tokens) :].tolist())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_continues_as_transformers_does(family: str) -> None:
    model = tiny_model(family)
    expected = [greedy(model, prompt(i, n), 24) for i, n in enumerate((5, 70, 200))]
    with engine_of(model, max_batch_tokens=64) as engine:
        streams = [engine.submit(request(prompt(i, n))) for i, n in enumerate((5, 70, 200))]
        assert [stream.result(60).tokens for stream in streams] == expected
        again = [engine.submit(request(prompt(i, n))).result(60) for i, n in enumerate((5, 70, 200))]
        assert [c.tokens for c in again] == expected
        assert [c.receipt.exact for c in again] == [4, 69, 199], "all but the last token, also within blocks"


def test_a_failing_batch_ends_its_requests_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    expected = greedy(model, prompt(1, 40), 24)
    forward = ModelRunner.forward

    def fails_on_long_prompts(runner: ModelRunner, batch: Batch) -> torch.Tensor:
        if len(batch.tokens) > 100:
            raise RuntimeError("out of memory")
        return forward(runner, batch)

    monkeypatch.setattr(ModelRunner, "forward", fails_on_long_prompts)
    with engine_of(model) as engine:
        with pytest.raises(ForwardFailed, match="out of memory"):
            engine.submit(request(prompt(0, 200))).result(60)
        assert engine.submit(request(prompt(1, 40))).result(60).tokens == expected
        engine.wait_idle()
        engine.query(EngineParts.check_integrity)
        assert engine.inspect()["cache"]["leased_blocks"] == 0
