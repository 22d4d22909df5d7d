"""Every architecture of the table: served as Transformers generates, translated as well as Llama, or refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from statistics import mean

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kedge.engine.local.batch import flatten
from kedge.engine.local.model.loading import checked_runner, require_buildable
from kedge.engine.local.model.replica import random_model
from kedge.engine.local.model.runner import ModelRunner
from kedge.engine.local.scheduler import Work
from kedge.engine.local.sequence import RequestSequence, Sequence
from kedge.errors import UnsupportedModel
from kedge.kv.segment import KVSegment
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.types import Namespace, RequestId, ReuseMode, TenantId, Tokens
from tests.engine.local.conftest import engine_of
from tests.engine.local.model.architectures import ARCHITECTURES
from tests.engine.local.test_engine import greedy, prompt
from tests.engine.local.test_engine import request as plain
from tests.engine.local.test_translation import Driver, relative, request, tokens
from tests.marks import on_push

BY_NAME = {one.name: one for one in ARCHITECTURES}
REFUSED = {
    "DeepSeek-V3.2, sparse MLA": "layers of type indexed_attention",
    "GLM-5, sparse MLA": "layers of type indexed_attention",
    "Qwen3-Next, linear attention": "layers of type linear_attention keep one state of all tokens before",
    "Jamba, state space": "layers of type linear_attention keep one state of all tokens before",
    "LFM2, short convolutions": "layers of type conv keep one state of all tokens before",
    "Falcon-H1, state space and attention in one layer": "layers of type hybrid keep one state of all tokens before",
    "Mamba 2, state space only": "layers of type linear_attention keep one state of all tokens before",
    "RWKV": "its config has no `num_attention_heads`",
    "Llama 4, chunked attention": "layers of type chunked_attention",
    "StableLM": "attention of its own only",
    "GPT-2, learned positions": "no rotary position embedding",
}
NOT_TRANSLATED = {
    "HunYuan, keys scaled after rotation": "the keys of layer 0 are rotated in none of the known ways",
    "Phi-3, LongRoPE": "longrope RoPE changes with the length of the prompt",
}
SERVED = [name for name in BY_NAME if name not in REFUSED]
TRANSLATED = [name for name in SERVED if name not in NOT_TRANSLATED]
ON_PUSH = {
    "Llama", "Llama, YaRN", "Qwen3 MoE", "GLM-4, partial rotary", "Cohere, neighbours paired",
    "SmolLM3, layers without RoPE", "Mistral, sliding window", "Gemma 2", "Gemma 4, layers that share KV",
    "gpt-oss, attention sinks", "MiniCPM3, MLA", "HunYuan, keys scaled after rotation", "Phi-3, LongRoPE",
}  # fmt: skip
"""One of each kind of attention, rotation and cache"""
ANSWER = 64


def model_of(name: str, seed: int = 0) -> PreTrainedModel:
    return random_model(BY_NAME[name].config(), seed)


@pytest.mark.parametrize("name", BY_NAME)
def test_the_verdict_is_the_expected_one(name: str) -> None:
    if name in REFUSED:
        with pytest.raises(UnsupportedModel) as refused:
            require_buildable(BY_NAME[name].config())
        assert REFUSED[name] in refused.value.why
    else:
        refusal = checked_runner(model_of(name)).refusal
        assert refusal is None if name not in NOT_TRANSLATED else NOT_TRANSLATED[name] in str(refusal)


@pytest.mark.parametrize("name", on_push(SERVED, ON_PUSH))
def test_answers_are_those_of_transformers_with_and_without_exact_reuse(name: str) -> None:
    """Prompts of several lengths in one batch, longer than the windows; then again, beginning with cached blocks and
    parts of blocks.
    """
    model = model_of(name)
    prompts = [prompt(0, 5), prompt(1, 70), prompt(2, 200), prompt(2, 200)[:100] + prompt(3, 41)]
    expected = [greedy(model, one, ANSWER) for one in prompts]
    with engine_of(model, max_batch_tokens=64) as engine:
        for mode, reused in (
            (ReuseMode.OFF, [0, 0, 0, 0]),
            (ReuseMode.EXACT, None),
            (ReuseMode.EXACT, [4, 69, 199, 140]),
        ):
            streams = [engine.submit(plain(one, mode, max_tokens=ANSWER)) for one in prompts]
            done = [stream.result(120) for stream in streams]
            assert [one.tokens for one in done] == expected
            assert reused is None or [one.receipt.exact for one in done] == reused


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


@pytest.mark.parametrize("name", on_push(TRANSLATED, ON_PUSH))
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


@cache
def errors(name: str, **changes: object) -> tuple[float, float]:
    """The mean error of translated prompts of four random models with pools of six values: of KV, relative to its size,
    and of the first token, as the KL to dense prefill in units of the KL between two questions.
    """
    one = BY_NAME[name]
    as_lists = {key: list(value) if isinstance(value, tuple) else value for key, value in changes.items()}
    one = replace(one, values={**one.values, **as_lists})
    of_kv, of_token, of_question = [], [], []
    for seed in range(4):
        driver = Driver(random_model(one.config(), seed))
        for i in range(6):
            values = words(50 + i, 35 - 3 * i), words(80 + i, 24 - i)
            driver.serve(request(*values, agent="critic", max_tokens=1))
            driver.serve(request(*values, max_tokens=1))
        before: Tensor | None = None
        for i in range(5):
            values = words(70 + i, 27), words(90 + i, 18)
            driver.serve(request(*values, agent="critic", max_tokens=1))  # leaves base KV behind
            asked = replace(request(*values, max_tokens=1), logprobs=264)
            translated, estimated = driver.serve(asked)
            dense, real = driver.serve(replace(asked, reuse=ReuseMode.OFF, request_id=f"off-{i}"))
            assert translated.receipt().translated > 50
            of_kv.append(relative(estimated.keys, real.keys) + relative(estimated.values, real.values))
            of_token.append(divergence(dense, translated))
            now = distribution(dense)
            of_question += [] if before is None else [float((now.exp() * (now - before)).sum())]
            before = now
    return mean(of_kv), mean(of_token) / mean(of_question)


def divergence(dense: RequestSequence, translated: RequestSequence) -> float:
    """KL(dense ‖ translated) of the first token, in nats."""
    p, q = distribution(dense), distribution(translated)
    return float((p.exp() * (p - q)).sum())


DENSE, ALL_CHOSEN = {"first_k_dense_replace": 3}, {"num_local_experts": 2}
"""No choice between experts, since other ones add an error that is not that of attention"""
LIKE_LLAMA = {
    "Mistral, sliding window": {}, "Gemma 2": {}, "Gemma 3": {}, "Gemma 4": {}, "Gemma 3n": {}, "OLMo 3": {},
    "Phi, partial rotary": {},
    "GLM-4, partial rotary": {}, "Cohere, neighbours paired": {}, "SmolLM3, layers without RoPE": {},
    "gpt-oss, attention sinks": ALL_CHOSEN, "MiMo V2, sinks and narrow values": {}, "DeepSeek-V2, MLA": DENSE,
    "DeepSeek-V3 and Kimi K2, MLA": DENSE, "MiniCPM3, MLA": {},
    "GLM-4.7-Flash, MLA": {"mlp_layer_types": ("dense",) * 3},
}  # fmt: skip


@pytest.mark.parametrize("name", on_push(LIKE_LLAMA, ON_PUSH))
def test_translation_is_as_good_as_on_llama(name: str) -> None:
    """Compared with a Llama with as many KV heads, over the same values."""
    heads = 4 if "MLA" in name or name in ("Phi, partial rotary", "MiMo V2, sinks and narrow values") else 2
    of_kv, of_token = errors(name, **LIKE_LLAMA[name])
    as_kv, as_token = errors("Llama", num_key_value_heads=heads)
    print(f"{name}: KV {of_kv:.2f}, token {of_token:.2f}; Llama: {as_kv:.2f}, {as_token:.2f}")
    assert of_kv < 1.05 * as_kv
    assert of_token < 2.2 * as_token  # which is half of what it was before values came from their last reader
