"""Every architecture of the table: served as Transformers generates, translated as well as Llama, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kedge.engine.local.batch import flatten
from kedge.engine.local.model.architectures import ARCHITECTURES, Architecture, verdict
from kedge.engine.local.model.loading import checked_runner
from kedge.engine.local.model.replica import random_model
from kedge.engine.local.model.runner import ModelRunner
from kedge.engine.local.scheduler import Work
from kedge.engine.local.sequence import RequestSequence, Sequence
from kedge.errors import RequestError
from kedge.kv.segment import KVSegment
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.types import GenerateRequest, Namespace, RequestId, ReuseMode, TenantId, Tokens
from tests.engine.local.conftest import engine_of
from tests.engine.local.test_engine import greedy, prompt
from tests.engine.local.test_engine import request as plain
from tests.engine.local.test_translation import Driver, relative, request, tokens

BY_NAME = {one.name: one for one in ARCHITECTURES}
REFUSED = {
    "DeepSeek-V3.2, sparse MLA": "layers of type indexed_attention",
    "GLM-5, sparse MLA": "layers of type indexed_attention",
    "Qwen3-Next, linear attention": "layers of type linear_attention",
    "Qwen3.5, linear attention": "layers of type linear_attention",
    "Kimi Linear": "layers of type linear_attention",
    "Falcon-H1, state space": "layers of type hybrid",
    "Llama 4, chunked attention": "layers of type chunked_attention",
    "StableLM": "attention of its own only",
    "GPT-2, learned positions": "no rotary position embedding",
}
NOT_TRANSLATED = {"Phi-3, LongRoPE": "longrope RoPE changes with the length of the prompt"}
SERVED = [name for name in BY_NAME if name not in REFUSED]
TRANSLATED = [name for name in SERVED if name not in NOT_TRANSLATED]
ANSWER = 64


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_of(name: str, seed: int = 0) -> PreTrainedModel:
    return random_model(BY_NAME[name].config(), seed)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=BY_NAME)
def test_the_verdict_is_the_expected_one(architecture: Architecture) -> None:
    found = verdict(architecture)
    expected = REFUSED.get(architecture.name)
    assert (found.refusal is None) if expected is None else (expected in str(found.refusal))
    expected = expected or NOT_TRANSLATED.get(architecture.name)
    assert (found.translation_refusal is None) if expected is None else (expected in str(found.translation_refusal))


@pytest.mark.parametrize("name", SERVED)
def test_answers_are_those_of_transformers_with_and_without_exact_reuse(name: str) -> None:
    """Prompts of several lengths in one batch, longer than the windows; then again, beginning with cached blocks."""
    model = model_of(name)
    prompts = [prompt(0, 5), prompt(1, 70), prompt(2, 200), prompt(2, 200)[:100] + prompt(3, 41)]
    expected = [greedy(model, one, ANSWER) for one in prompts]
    with engine_of(model, max_batch_tokens=64) as engine:
        for mode, reused in (
            (ReuseMode.OFF, [0, 0, 0, 0]),
            (ReuseMode.EXACT, None),
            (ReuseMode.EXACT, [0, 64, 192, 128]),
        ):
            streams = [engine.submit(plain(one, mode, max_tokens=ANSWER)) for one in prompts]
            done = [stream.result(120) for stream in streams]
            assert [one.tokens for one in done] == expected
            assert reused is None or [one.receipt.exact for one in done] == reused


@pytest.mark.parametrize("name", SERVED)
def test_a_hostile_and_a_cancelled_request_change_no_other(name: str) -> None:
    model = model_of(name)
    expected = greedy(model, prompt(1, 70), 16)
    with engine_of(model, max_batch_tokens=32, num_blocks=40) as engine:
        streams = [engine.submit(plain(prompt(1, 70), max_tokens=16)) for _ in range(3)]
        cancelled = engine.submit(plain(prompt(4, 90), max_tokens=400))
        with pytest.raises(RequestError):
            engine.submit(plain((1, 2**40)))
        assert engine.cancel(cancelled.request_id)
        assert [stream.result(60).tokens for stream in streams] == [expected] * 3
        engine.wait_idle(60)
        assert engine.inspect()["cache"]["leased_blocks"] == 0


def kv_at(runner: ModelRunner, prompt: Tokens, start: int) -> KVSegment:
    """Unrotated KV of a prompt whose positions begin at `start`, with nothing before it."""
    storage = PagedStorage(runner.spec, 16, 16, runner.device, runner.rotary)
    sequence = Sequence(RequestId("x"), Namespace(TenantId("")), list(prompt), SlotTable.of(list(range(16)), 16))
    batch = flatten([Work(sequence, list(range(len(prompt))))], storage)
    batch.positions = batch.positions + start
    runner.forward(batch)
    keys = runner.rotary.unrotate(storage.keys[:, : len(prompt)], slice(start, start + len(prompt)))
    return KVSegment(keys, storage.values[:, : len(prompt)])


@pytest.mark.parametrize("name", TRANSLATED)
def test_kv_of_a_prompt_is_the_same_wherever_it_begins(name: str) -> None:
    """All positions moved by the same number change no score, and so nothing but the rotation of keys."""
    runner = checked_runner(model_of(name))
    here, there = (kv_at(runner, prompt(5, 60), start) for start in (0, 700))
    for layer in range(runner.spec.layers):
        assert relative(there.keys[layer], here.keys[layer]) < 1e-3
        assert relative(there.values[layer], here.values[layer]) < 1e-3


@pytest.mark.parametrize("name", TRANSLATED)
def test_an_exact_repeat_of_an_anchor_reproduces_its_kv(name: str) -> None:
    driver = Driver(model_of(name))
    asked = request(tokens(50, 30), tokens(51, 12))
    for seed in (60, 61):
        driver.serve(request(tokens(seed, 30), tokens(seed + 5, 12)))
    _, dense = driver.serve(asked)
    again, translated = driver.serve(replace(asked, request_id="again"))
    assert again.plan.translates
    assert relative(translated.keys, dense.keys) < 1e-3
    assert relative(translated.values, dense.values) < 1e-3


def words(seed: int, size: int) -> Tokens:
    """Text of 32 words: values resemble each other."""
    return tuple(token // 8 * 8 for token in tokens(seed, size))


def distribution(sequence: RequestSequence) -> Tensor:
    """Log-probabilities of the first token, float64 [vocabulary]."""
    out = torch.full((264,), -torch.inf, dtype=torch.float64)
    for token, logprob in sequence.logprobs.answer[0].top:
        out[token] = logprob
    return out


def served_twice(driver: Driver, asked: GenerateRequest) -> tuple[float, float, float]:
    """KL of the first token, and relative errors of keys and values, of a translated prompt to the dense one."""
    driver.serve(replace(asked, request_id=f"{asked.request_id}-base"))  # leaves base KV behind
    translated, estimated = driver.serve(replace(asked, request_id=f"{asked.request_id}-again"))
    dense, real = driver.serve(replace(asked, reuse=ReuseMode.OFF, request_id=f"{asked.request_id}-off"))
    assert translated.plan.translates
    assert translated.receipt().translated > 40
    p, q = distribution(dense), distribution(translated)
    kl = float((p.exp() * (p - q)).sum())
    return kl, relative(estimated.keys, real.keys), relative(estimated.values, real.values)
