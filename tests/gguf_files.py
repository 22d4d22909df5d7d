"""Writing small random models as GGUF files, as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

TOKENS = [*bytes_to_unicode().values(), "ab", "<s>", "</s>", "<end>"]
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}<s>"


@dataclass(frozen=True)
class Family:
    """An architecture of GGUF: how its weights differ from Transformers', and which values go by what names."""

    architecture: str
    config: PretrainedConfig
    values: Mapping[str, Any] = field(default_factory=dict)
    norm_offset: float = 0.0
    is_permuted: bool = False
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


def tiny_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return a model with weights so large that its tokens vary, and biases and norms that matter."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        spread = 0.3 if parameter.dim() == 1 else 0.12
        parameter.data = torch.randn_like(parameter) * spread + (1 if "norm" in name and "offset" not in name else 0)
    return model


def write_gguf(
    path: Path,
    family: Family,
    model: PreTrainedModel,
    *,
    template: str | None = TEMPLATE,
    tokens: bool = True,
    quantized: bool = False,
    omit: str = "",
    bare: bool = False,
) -> Path:
    """Write a model as a GGUF file: in float32, or in 8-bit blocks if `quantized`.

    `omit` is a tensor to leave out, and `bare` leaves out all.
    """
    import gguf

    writer, config = gguf.GGUFWriter(path, family.architecture), family.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    for name, value in family.values.items():
        add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(f"{family.architecture}.{name}" if not name.startswith("tokenizer") else name, value)
    if tokens:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(TOKENS)
        writer.add_token_types([1] * 257 + [3] * 3)
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(257)
        writer.add_eos_token_id(258)
        if template is not None:
            writer.add_chat_template(template)
    tensors = {} if bare else gguf_tensors(family, model)
    for name, tensor in {**tensors, **family.tensors}.items():
        if name != omit:
            values = tensor.float().numpy()
            if quantized and values.ndim == 2:
                values = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
                writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            else:
                writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(family: Family, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a model's tensors by their names in GGUF, as they are stored there."""
    import gguf

    config = family.config
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture)
    names, stored = gguf.get_tensor_name_map(architecture, config.num_hidden_layers), {}
    for own, parameter in model.named_parameters():
        base, _, kind = own.rpartition(".")
        name, tensor = f"{names.get_name(base)}.{kind}", parameter.data
        if "norm" in own:
            tensor = tensor + family.norm_offset
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        if family.is_permuted and (count := heads.get(base.rpartition(".")[2])):
            half = tensor.shape[0] // count // 2
            tensor = tensor.reshape(count, 2, half, -1).swapaxes(1, 2).reshape(tensor.shape)
        stored[name] = tensor
    return stored
