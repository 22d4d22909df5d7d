"""Models to measure: random-weight Llamas of chosen sizes, for time without real weights, and those of folders."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kedge.engine.common.model_folder import model_path, pick_device
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.engine.local import build
from kedge.engine.local.model.loading import checked_runner
from kedge.engine.local.model.runner import ModelRunner
from kedge.errors import ConfigError
from kedge.settings import EngineSettings

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2,
             "num_key_value_heads": 1, "vocab_size": 1152},
    "32m": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8,
            "num_key_value_heads": 4, "vocab_size": 16384},
    "100m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
             "num_key_value_heads": 4, "vocab_size": 32000},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
"""Llama shapes with grouped-query attention; `8b` is Llama-3.1-8B's, `tiny` is for tests of the machinery."""

Loaded = tuple[ModelRunner, HFTokenizer]


def random_llama(size: str, device: torch.device, dtype: torch.dtype, seed: int = 0) -> LlamaForCausalLM:
    """Return a Llama of `size` with random weights, created on `device` in `dtype`.

    Raises `ConfigError` for an unknown size.
    """
    config = llama_config(size)
    torch.manual_seed(seed)
    with torch.device(device):
        return LlamaForCausalLM._from_config(config, dtype=dtype).eval()


def llama_config(size: str) -> LlamaConfig:
    """Return the config of a Llama of `size`. Raises `ConfigError` for an unknown one."""
    if size not in SHAPES:
        raise ConfigError("model-size", size, f"must be one of {', '.join(SHAPES)}")
    tied = size != "8b"
    return LlamaConfig(
        **SHAPES[size], max_position_embeddings=16384, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=1
    )


def random_runner(size: str, device: str) -> Loaded:
    """Return a runner of `random_llama` and a tokenizer that does not fit it: prompts are token ids."""
    place = pick_device(device)
    dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    runner = build.on_scratch_thread(lambda: checked_runner(random_llama(size, place, dtype)))
    return runner, HFTokenizer.load(model_path(None))


def to_compare(**settings: Any) -> EngineSettings:
    """Return settings of engines whose answers are compared: in float32 on a CPU, since what 16 bits round there is as
    much as what fp8 KV does.
    """
    return EngineSettings(**{"dtype": "auto" if torch.cuda.is_available() else "float32", **settings})


def load_model(model: Path | None, config: EngineSettings) -> Loaded:
    """Load a model (None: the bundled one) for several engines, of which only one may work at a time."""
    runner, path = build.load_runner(model, config)
    return runner, HFTokenizer.load(path)
