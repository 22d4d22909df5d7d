"""Small random models of a kind, with which a config can be tried quickly without its weights.

Sizes are cut down by name, and one layer of each kind is kept. Sizes that a family computes itself are left to it; a
config with sizes that depend on each other in an unusual way may not yield a model.

`ARCHITECTURES` are those that `kedge inspect --architectures` and the tests try, with chosen sizes. This is a list of
what to try, not of what is supported: nothing of it is looked up when a model is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import AutoModelForCausalLM

from kedge.engine.local.model.loading import checked_runner, require_buildable
from kedge.errors import UnsupportedModel
from kedge.kv.spec import KVSpec, translation_refusal

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


logger = logging.getLogger(__name__)
HEADS, HEAD_DIM, VOCABULARY, LONGEST, WINDOW = 4, 16, 264, 512, 8
MOST_LAYERS = 8
WIDTH = HEADS * HEAD_DIM
PARAMETERS = 20_000_000
"""Most parameters of a small model"""

NAMES: Mapping[int, str] = MappingProxyType(
    {
        WIDTH: "hidden_size d_model n_embd dim_model emb_dim embedding_size embedding_dim word_embed_proj_dim",
        96: "intermediate_size intermediate_size_mlp dense_intermediate_size ffn_dim ffn_hidden_size encoder_ffn_dim "
        "decoder_ffn_dim n_inner d_inner dff dim_ff feed_forward_size",
        32: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
        "q_lora_rank kv_lora_rank qk_head_dim",
        HEADS: "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads moe_num_experts "
        "decoder_attention_heads num_attention_heads_per_layer num_experts n_routed_experts num_local_experts",
        2: "num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_topk moe_k",
        1: "n_group topk_group first_k_dense_replace",
        HEAD_DIM: "head_dim d_head v_head_dim qk_rope_head_dim qk_nope_head_dim query_pre_attn_scalar",
        HEAD_DIM // 2: "rotary_dim",
        LONGEST: "max_position_embeddings n_positions n_ctx max_seq_len",
        LONGEST // 2: "original_max_position_embeddings",
        WINDOW: "sliding_window attention_window_size window_size",
        VOCABULARY: "vocab_size vocab_size_per_layer_input",
    }
)
SIZES: Mapping[str, int] = MappingProxyType({name: size for size, names in NAMES.items() for name in names.split()})
"""The small sizes, by name"""
NEEDED: Mapping[str, int] = MappingProxyType({"head_dim": HEAD_DIM, "num_key_value_heads": HEADS})
"""The small sizes that are set even where a family leaves them out"""
LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers",
    "decoder_layers", "encoder_layers", "num_decoder_layers", "num_encoder_layers",
)  # fmt: skip
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
class Trial:
    """The result of trying a small model."""

    ran: bool
    """Whether it could be built; then it was run, and its results are right."""
    translation_refusal: str | None
    keeps_heads: bool = False
    """Whether keys and values of all heads are kept, where according to the config a latent would do."""


def trial(config: PretrainedConfig) -> Trial:
    """Try a small random model of this kind. Raises `UnsupportedModel` where Kedge refuses it."""
    try:
        model = random_model(small_config(config))
    except Exception as error:  # whatever a family raises for sizes that do not go together
        logger.info("no small copy of this %s can be built: %s", config.model_type, error)
        return Trial(False, translation_refusal(config))
    runner = checked_runner(model)
    keeps_heads = not runner.spec.latent and KVSpec.from_config(runner.model.config).latent > 0
    return Trial(True, translation_refusal(config) or runner.refusal, keeps_heads)


def small_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return a config of the same kind with sizes cut down, and with layers of every type that it lists.

    Raises whatever a family raises for its sizes.
    """
    values = {name: value for name, value in config.to_dict().items() if name != "quantization_config"}
    return type(config).from_dict(_small(values))


def random_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Return a float32 model with random weights, large enough that attention affects its logits."""
    with torch.device("meta"):
        count = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if count > PARAMETERS:
        raise ValueError(f"it has {count:,} parameters, with small sizes")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # again, since a family initialises biases and sinks to zero and makes all tokens alike
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                weight.copy_(noise * 1.5 / weight.shape[-1] ** 0.5)
            else:
                weight.add_(noise * 0.3)
    return cast("PreTrainedModel", model)


@dataclass(frozen=True, slots=True)
class _Layers:
    """The number of layers of a config, and those that are kept."""

    count: int
    kept: list[int]

    @classmethod
    def of(cls, values: dict[str, Any]) -> _Layers:
        """Keep the first layer of every kind, and at least two."""
        count = next((values[name] for name in LAYERS if isinstance(values.get(name), int)), 0)
        lists = [value for value in values.values() if isinstance(value, list) and len(value) == count]
        kinds: dict[str, int] = {}
        for layer in range(count):
            kinds.setdefault(repr([value[layer] for value in lists]), layer)
        kept = list(kinds.values())[:MOST_LAYERS]
        return cls(count, kept if len(kept) > 1 else list(range(min(count, 2))))


def _small(values: dict[str, Any]) -> dict[str, Any]:
    """Return a config's values cut down, nested configs included."""
    layers = _Layers.of(values)
    small = {name: _cut(name, value, layers) for name, value in values.items()}
    heads = values.get("num_attention_heads")
    if "num_key_value_heads" in values and values["num_key_value_heads"] == heads:
        small["num_key_value_heads"] = small["num_attention_heads"]
    return small


def _cut(name: str, value: Any, layers: _Layers) -> Any:
    """Return one value of a config cut down."""
    if name == "per_layer_config" and isinstance(value, dict):
        by_layer = {int(layer): _small(changes) for layer, changes in value.items()}
        return {at: by_layer[layer] for at, layer in enumerate(layers.kept) if layer in by_layer}
    if isinstance(value, dict):
        return _cut_rope(value) if name.startswith("rope") else _small(value) if name.endswith("_config") else value
    if isinstance(value, list):
        cut = [value[layer] for layer in layers.kept] if len(value) == layers.count else value
        return [_cut_size(name, one) for one in cut]
    return NEEDED.get(name) if value is None else _cut_size(name, value, len(layers.kept))


def _cut_size(name: str, value: Any, layers: int = 0) -> Any:
    """Return a number as it is in the small config; other values unchanged."""
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if name.endswith(("_token_id", "_token_index")):
        return min(value, VOCABULARY - 1)
    return layers if name in LAYERS and layers else min(value, SIZES.get(name, value))


def _cut_rope(values: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of RoPE for small heads: lists have one number per pair of dimensions."""
    pairs = int(HEAD_DIM * (values.get("partial_rotary_factor") or 1.0)) // 2
    return {
        name: _cut_rope(value) if isinstance(value, dict)
        else value[:pairs] if isinstance(value, list)
        else _cut_size(name, value)
        for name, value in values.items()
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Architecture:
    """A kind of decoder, with the sizes of a small model of it."""

    name: str
    model_type: str
    values: Mapping[str, Any] = field(default_factory=dict)
    """What differs from `SHAPE`"""

    def config(self) -> PretrainedConfig:
        """Return the config of a small model."""
        from transformers import AutoConfig

        return AutoConfig.for_model(self.model_type, **{**SHAPE, **self.values})


@dataclass(frozen=True, slots=True)
class TriedArchitecture:
    """What Kedge does with an architecture, found by trying it."""

    refusal: str | None
    """Why it is not run; None if it runs, and its output is that of Transformers"""
    translation_refusal: str | None
    """Why its KV is not translated; None if it is"""


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
"""One place that names what is tried, the served first"""


def verdict(architecture: Architecture) -> TriedArchitecture:
    """Try a small random model. Unlike those of `trial`, its sizes are chosen, not cut down."""
    config = architecture.config()
    try:
        require_buildable(config)
        return TriedArchitecture(None, checked_runner(random_model(config)).refusal)
    except UnsupportedModel as error:
        return TriedArchitecture(error.why, error.why)
