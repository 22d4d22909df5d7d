"""Tiny random models of every family, with a byte-level tokenizer, as oracles and as engines."""

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from kedge.engine.common.tokenizer import HFTokenizer
from kedge.engine.local.engine import LocalEngine
from kedge.engine.local.model.loading import checked_runner
from kedge.settings import EngineSettings
from kedge.types import Completion, GenerateRequest

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

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma2": ("gemma2", GEMMA2),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-sliding": ("mistral", {"sliding_window": 16}),
}


def tiny_model(family: str) -> PreTrainedModel:
    model_type, values = FAMILIES[family]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SHAPE, **values})).eval()


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


def tiny_engine(num_blocks: int = 256) -> LocalEngine:
    return engine_of(tiny_model("llama"), kv_memory=f"{num_blocks} blocks")


def served(engine: LocalEngine, request: GenerateRequest) -> Completion:
    """The answer to a request, once all that follows from it has been done."""
    done = engine.submit(request).result(60)
    engine.wait_idle(60)
    return done


def at_rest(engine: LocalEngine) -> None:
    """Check that nothing is left of requests that have ended."""
    engine.wait_idle(60)
    engine.query(lambda parts: parts.cache.check_integrity())
    assert engine.inspect()["cache"]["leased_blocks"] == 0
