"""Tiny random models of every family, with a byte-level tokenizer, as oracles and as engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kedge.engine.common.tokenizer import HFTokenizer
from kedge.engine.local.engine import LocalEngine
from kedge.engine.local.model.loading import checked_runner
from kedge.settings import EngineSettings

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where tests run that say something about a GPU, where there is one; all others run on the CPU"""
SHAPE = {
    "vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": 256, "eos_token_id": 257,
    "pad_token_id": 258, "initializer_range": 0.2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
# Caps that matter: tied to its embeddings, a random model repeats its last token whatever it attends to.
GEMMA2 = {
    "head_dim": 16, "query_pre_attn_scalar": 1, "attn_logit_softcapping": 2.0, "sliding_window": 16,
    "tie_word_embeddings": False,
}  # fmt: skip

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama3-rope": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3)),
    "yarn": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=YARN)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, **GEMMA2)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "mistral-sliding": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=16)),
}


def tiny_model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return FAMILIES[family]().eval()


def tiny_tokenizer() -> HFTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<s>", "</s>", "<pad>"])
    return HFTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    )


def engine_of(model: PreTrainedModel, **settings: object) -> LocalEngine:
    """An engine that translates whatever it can: on models as small as these, computing is always cheaper, and on
    random weights translation changes most answers.
    """
    fixed = {"kv_memory": "256 blocks", "block_size": 16, "device": model.device.type, "planner": {"by_cost": False}}
    config = EngineSettings(**{"guard": {"mode": "off"}, **fixed, **settings})
    return LocalEngine.from_runner(checked_runner(model), tiny_tokenizer(), config)


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with engine_of(tiny_model("llama")) as built:
        yield built
