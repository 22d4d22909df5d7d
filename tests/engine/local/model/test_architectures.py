"""Every architecture of the table: served as Transformers generates, translated as well as Llama, or refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from kedge.anchors.estimators import ESTIMATORS
from kedge.anchors.translator import in_chunks, in_one_pass, translate_into
from kedge.engine.local.model.loading import checked_runner, require_buildable
from kedge.engine.local.model.replica import VOCABULARY, random_model
from kedge.engine.local.model.runner import ModelRunner
from kedge.engine.local.sequence import Sequence, Work, flatten
from kedge.errors import UnsupportedModel
from kedge.kv.segment import KVSegment
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.settings import AnchorSettings, TierSettings
from kedge.types import Namespace, ReuseMode, Tokens
from tests.engine.common.state.test_snapshot import ask
from tests.engine.local.conftest import engine_of
from tests.engine.local.test_engine import greedy, prompt
from tests.engine.local.test_engine import request as plain
from tests.engine.local.test_translation import OPEN, SETTINGS, Driver, relative, request, tokens
from tests.marks import on_push

SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": False,
    "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258,
}  # fmt: skip
"""Sizes of all small models"""
MIXED = ["sliding_attention", "sliding_attention", "full_attention"]
TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}  # fmt: skip
DEEPSEEK = {**LATENT, **EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A kind of decoder, with the sizes of a small model of it."""

    name: str
    model_type: str
    values: Mapping[str, Any] = field(default_factory=dict)
    """What differs from `SHAPE`"""

    def config(self) -> PretrainedConfig:
        """Return the config of a small model."""
        return AutoConfig.for_model(self.model_type, **{**SHAPE, **self.values})


ARCHITECTURES = (
    Architecture("Llama", "llama"),
    Architecture("Llama, YaRN", "llama", {"rope_parameters": YARN}),
    Architecture("Mistral", "mistral", {"sliding_window": None}),
    Architecture("Qwen3", "qwen3", {"head_dim": 32}),
    Architecture("Qwen3 MoE", "qwen3_moe", {"head_dim": 16, "num_experts": 4, **EXPERTS}),
    Architecture("OLMo 2", "olmo2"),
    Architecture("Granite", "granite"),
    Architecture("Phi, partial rotary", "phi"),
    Architecture("GPT-NeoX, partial rotary", "gpt_neox"),
    Architecture("GLM-4, partial rotary", "glm4", {"head_dim": 16}),
    Architecture("Cohere, neighbours paired", "cohere"),
    Architecture("SmolLM3, layers without RoPE", "smollm3", {"no_rope_layers": [1, 1, 0]}),
    Architecture("Mistral, sliding window", "mistral", {"sliding_window": 16}),
    Architecture(
        "Gemma 2", "gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16,
                              "layer_types": MIXED},
    ),
    Architecture(
        "Gemma 3", "gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16,
                                   "layer_types": MIXED, "rope_parameters": TWO_ROPES},
    ),
    Architecture(
        "Gemma 4", "gemma4_text",
        {"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
         "sliding_window": 16, "layer_types": MIXED, "hidden_size_per_layer_input": 16,
         "vocab_size_per_layer_input": VOCABULARY},
    ),
    Architecture(
        "Gemma 4, layers that share KV", "gemma4_text",
        {"head_dim": 16, "global_head_dim": 32, "sliding_window": 16, "num_hidden_layers": 6, "layer_types": 2 * MIXED,
         "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY},
    ),
    Architecture(
        "OLMo 3", "olmo3",
        {"sliding_window": 16, "layer_types": MIXED, "rope_parameters": {**TWO_ROPES, "full_attention": YARN}},
    ),
    Architecture(
        "gpt-oss, attention sinks", "gpt_oss",
        {"head_dim": 16, "sliding_window": 16, "layer_types": MIXED, "num_local_experts": 4, "num_experts_per_tok": 2,
         "rope_parameters": YARN},
    ),
    Architecture(
        "MiMo V2, sinks and narrow values", "mimo_v2_flash",
        {**EXPERTS, "head_dim": 24, "v_head_dim": 16, "n_routed_experts": 4, "sliding_window": 16,
         "layer_types": MIXED, "mlp_layer_types": ["dense", "sparse", "sparse"], "rope_parameters": TWO_ROPES},
    ),
    Architecture(
        "Gemma 3n", "gemma3n_text",
        {"head_dim": 16, "sliding_window": 16, "num_hidden_layers": 6, "layer_types": 2 * MIXED, "laurel_rank": 8,
         "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY,
         "rope_parameters": TWO_ROPES, "activation_sparsity_pattern": [0.0] * 6, "intermediate_size": [96] * 6},
    ),
    Architecture("DeepSeek-V2, MLA", "deepseek_v2", {**DEEPSEEK, "topk_method": "group_limited_greedy"}),
    Architecture("DeepSeek-V3 and Kimi K2, MLA", "deepseek_v3", DEEPSEEK),
    Architecture("DeepSeek-V3, MLA and YaRN", "deepseek_v3", {**DEEPSEEK, "rope_parameters": YARN}),
    Architecture("GLM-4.7-Flash, MLA", "glm4_moe_lite", DEEPSEEK),
    Architecture("MiniCPM3, MLA", "minicpm3", LATENT),
    Architecture("HunYuan, keys scaled after rotation", "hunyuan_v1_dense", {"head_dim": 16}),
    Architecture("Phi-3, LongRoPE", "phi3", {
        "original_max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "short_factor": [1.0] * 8,
                            "long_factor": [4.0] * 8, "original_max_position_embeddings": 512},
    }),
    Architecture("DeepSeek-V3.2, sparse MLA", "deepseek_v32", DEEPSEEK),
    Architecture("GLM-5, sparse MLA", "glm_moe_dsa", DEEPSEEK),
    Architecture("Qwen3-Next, linear attention", "qwen3_next"),
    Architecture("Jamba, state space", "jamba", {"attn_layer_period": 3, "attn_layer_offset": 2}),
    Architecture("LFM2, short convolutions", "lfm2", {"layer_types": ["conv", "conv", "full_attention"]}),
    Architecture("Falcon-H1, state space and attention in one layer", "falcon_h1"),
    Architecture("Mamba 2, state space only", "mamba2", {"num_heads": 8, "head_dim": 16}),
    Architecture("RWKV", "rwkv", {"num_attention_heads": None}),
    Architecture("Llama 4, chunked attention", "llama4_text"),
    Architecture("StableLM", "stablelm"),
    Architecture("GPT-2, learned positions", "gpt2"),
)  # fmt: skip


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
    sequence = Sequence("x", Namespace(""), list(prompt), SlotTable.of(list(range(16)), 16))
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


UNLIKE = ["Gemma 3", "Gemma 4", "gpt-oss, attention sinks", "MiMo V2, sinks and narrow values", "DeepSeek-V2, MLA"]
NARROW = ["Gemma 4", "MiMo V2, sinks and narrow values"]
"""Those with layers that do not fill the pool"""


@pytest.mark.parametrize("name", UNLIKE)
def test_kv_comes_back_from_the_host(name: str) -> None:
    model = model_of(name)
    asked = [prompt(i, 100) for i in range(4)]
    wanted = [greedy(model, one, 8) for one in asked]
    tiers = TierSettings(host_memory="100 blocks", backup_hits=0, policy="lru")
    with engine_of(model, kv_memory="16 blocks", tiers=tiers) as engine:
        for again in range(2):
            for one, answer in zip(asked, wanted, strict=True):
                done = engine.submit(plain(one, max_tokens=8)).result(60)
                engine.wait_idle(60)
                assert done.tokens == answer
                assert done.receipt.exact == (96 if again else 0)


QUESTIONS = ((70, None), (80, None), (70, 81))


@pytest.mark.parametrize("name", UNLIKE)
def test_what_was_learned_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    with engine_of(model_of(name), **SETTINGS) as teacher:
        for seed in (50, 60):
            ask(teacher, seed)
        teacher.save(tmp_path)
        wanted = [ask(teacher, *one) for one in QUESTIONS]
    assert wanted[2][1] > 0
    with engine_of(model_of(name), **SETTINGS) as pupil:
        assert pupil.load(tmp_path).pools == 2
        assert [ask(pupil, *one) for one in QUESTIONS] == wanted


@pytest.mark.parametrize("name", [*NARROW, "DeepSeek-V2, MLA"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_takes_what_a_layer_does_not_fill_as_zero(name: str, estimator: str) -> None:
    driver = Driver(model_of(name), anchors=AnchorSettings(**OPEN, estimator=estimator))
    asked = request(tokens(50, 30), tokens(51, 12))
    for seed in (60, 61):
        driver.serve(request(tokens(seed, 30), tokens(seed + 5, 12)))
    _, dense = driver.serve(asked)
    again, translated = driver.serve(replace(asked, request_id="again"))
    assert again.plan.translates
    assert relative(translated.values, dense.values) < 0.02
    for storage in (translated, dense):
        for number, shape in enumerate(driver.runner.spec.shapes):
            require_zero_beyond(storage, number, shape.kv_heads, shape.key_dim, shape.value_dim)


def require_zero_beyond(kv: KVSegment, layer: int, kv_heads: int, key_dim: int, value_dim: int) -> None:
    for pool, dim in ((kv.keys[layer], key_dim), (kv.values[layer], value_dim)):
        assert not pool[:, kv_heads:].any()
        assert not pool[..., dim:].any()


@pytest.mark.parametrize(
    ("name", "how"), [("Llama", in_one_pass), ("Gemma 3", in_chunks), ("DeepSeek-V2, MLA", in_chunks)]
)
def test_the_kernel_that_translates_takes_one_rotation_of_the_first_dimensions(
    name: str, how: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PagedStorage, "has_kernels", True)
    runner = checked_runner(model_of(name))
    chosen = translate_into(PagedStorage(runner.spec, 32, 16, runner.device, runner.rotary))
    assert isinstance(chosen, partial)
    assert chosen.func is how
