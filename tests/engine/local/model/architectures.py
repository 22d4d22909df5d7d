"""Small models of the architectures that the tests try, with chosen sizes: the served ones first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from kedge.engine.local.model.replica import VOCABULARY

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
