"""Small random models of a kind, with which a config can be tried quickly without its weights.

Sizes are cut down by name, and one layer of each kind is kept. Sizes that a family computes itself are left to it; a
config with sizes that depend on each other in an unusual way may not yield a model.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from kedge.engine.local.model.loading import checked_runner
from kedge.kv.spec import KVSpec, translation_refusal

logger = logging.getLogger(__name__)
HEAD_DIM, VOCABULARY = 16, 264
PARAMETERS = 20_000_000
"""Most parameters of a small model"""

NAMES: Mapping[int, str] = MappingProxyType(
    {
        64: "hidden_size d_model n_embd dim_model emb_dim embedding_size embedding_dim word_embed_proj_dim",
        96: "intermediate_size intermediate_size_mlp dense_intermediate_size ffn_dim ffn_hidden_size encoder_ffn_dim "
        "decoder_ffn_dim n_inner d_inner dff dim_ff feed_forward_size",
        32: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
        "q_lora_rank kv_lora_rank qk_head_dim",
        4: "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads moe_num_experts "
        "decoder_attention_heads num_attention_heads_per_layer num_experts n_routed_experts num_local_experts",
        2: "num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_topk moe_k",
        1: "n_group topk_group first_k_dense_replace",
        HEAD_DIM: "head_dim d_head v_head_dim qk_rope_head_dim qk_nope_head_dim query_pre_attn_scalar",
        8: "rotary_dim sliding_window attention_window_size window_size",
        512: "max_position_embeddings n_positions n_ctx max_seq_len",
        256: "original_max_position_embeddings",
        VOCABULARY: "vocab_size vocab_size_per_layer_input",
    }
)
SIZES: Mapping[str, int] = MappingProxyType({name: size for size, names in NAMES.items() for name in names.split()})
"""The small sizes, by name"""
NEEDED: Mapping[str, int] = MappingProxyType({"head_dim": HEAD_DIM, "num_key_value_heads": 4})
"""The small sizes that are set even where a family leaves them out"""
LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers",
    "decoder_layers", "encoder_layers", "num_decoder_layers", "num_encoder_layers",
)  # fmt: skip


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


def _layers(values: dict[str, Any]) -> tuple[int, list[int]]:
    """Return the number of layers of a config, and those that are kept: the first of every kind, and at least two."""
    count = next((values[name] for name in LAYERS if isinstance(values.get(name), int)), 0)
    lists = [value for value in values.values() if isinstance(value, list) and len(value) == count]
    kinds: dict[str, int] = {}
    for layer in range(count):
        kinds.setdefault(repr([value[layer] for value in lists]), layer)
    kept = list(kinds.values())
    return count, kept if len(kept) > 1 else list(range(min(count, 2)))


def _small(values: dict[str, Any]) -> dict[str, Any]:
    """Return a config's values cut down, nested configs included."""
    layers = _layers(values)
    small = {name: _cut(name, value, *layers) for name, value in values.items()}
    heads = values.get("num_attention_heads")
    if "num_key_value_heads" in values and values["num_key_value_heads"] == heads:
        small["num_key_value_heads"] = small["num_attention_heads"]
    return small


def _cut(name: str, value: Any, count: int, kept: list[int]) -> Any:
    """Return one value of a config cut down."""
    if name == "per_layer_config" and isinstance(value, dict):
        by_layer = {int(layer): _small(changes) for layer, changes in value.items()}
        return {at: by_layer[layer] for at, layer in enumerate(kept) if layer in by_layer}
    if isinstance(value, dict):
        return _cut_rope(value) if name.startswith("rope") else _small(value) if name.endswith("_config") else value
    if isinstance(value, list):
        cut = [value[layer] for layer in kept] if len(value) == count else value
        return [_cut_size(name, one) for one in cut]
    return NEEDED.get(name) if value is None else _cut_size(name, value, len(kept))


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
