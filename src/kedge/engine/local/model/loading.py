"""Loading a Transformers model as it is, and running one flattened batch through it."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kedge.engine.common.token_bytes import Spelling
from kedge.engine.local.attention import paged as attention
from kedge.engine.local.attention.paged import Batch, Pass
from kedge.engine.local.model import masks, probe
from kedge.engine.local.model.graphs import StepGraphs
from kedge.errors import CorruptWeights, ModelNotFound, UnsupportedModel
from kedge.kv.rotary import Rotary
from kedge.kv.spec import KVSpec, longest, translation_refusal
from kedge.types import Tokens


def load(path: Path, dtype: torch.dtype | str, device: torch.device) -> PreTrainedModel:
    """Return a folder's model with its weights. Raises `ModelNotFound`, `CorruptWeights` or `UnsupportedModel`."""
    config = read_config(path)
    require_buildable(config)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation=attention.NAME, output_loading_info=True
        )
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise CorruptWeights("model", str(path), f"its weights cannot be loaded: {error}") from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise CorruptWeights("model", str(path), f"its weights lack {missing[0]} and {len(missing) - 1} more")
    return model.to(device).eval()


def read_config(path: Path) -> PretrainedConfig:
    """Return a folder's config. Raises `ModelNotFound`, or `UnsupportedModel` where Transformers cannot read it."""
    if not (path / "config.json").is_file():
        raise ModelNotFound("model", str(path), "no such folder, or no config.json in it")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # every family checks its values in a way of its own
        raise UnsupportedModel("model", str(path), f"its config cannot be read: {error}") from error


def require_buildable(config: PretrainedConfig) -> None:
    """Raise `UnsupportedModel` for a config that Kedge, or Transformers with Kedge's attention, makes no model of.

    A model is built without memory for weights, so that weights that do not fit are known for what they are.
    """
    KVSpec.from_config(config)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel("model_type", config.model_type, "no causal language model of Transformers")
    probe.require_interface(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    with probe.refusing(config.model_type), torch.device("meta"):
        AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation=attention.NAME)


class HFTokenizer:
    """A Transformers tokenizer as the `Tokenizer` of the Engine protocol."""

    def __init__(self, inner: PreTrainedTokenizerBase) -> None:
        self.inner = inner
        self.eos_token_id: int | None = inner.eos_token_id
        self._spelling = Spelling(inner.backend_tokenizer)

    @classmethod
    def load(cls, path: Path) -> HFTokenizer:
        try:
            return cls(AutoTokenizer.from_pretrained(path, local_files_only=True))
        except (OSError, ValueError) as error:
            raise ModelNotFound("tokenizer", str(path), f"cannot be loaded: {error}") from error

    def encode(self, text: str, *, special: bool = True) -> Tokens:
        return tuple(self.inner.encode(text, add_special_tokens=False, split_special_tokens=not special))

    def decode(self, tokens: Tokens) -> str:
        return cast(str, self.inner.decode(list(tokens), skip_special_tokens=True))

    def token_bytes(self, token: int) -> bytes:
        return self._spelling(token)

    def chat(self, system: str | None, user: str) -> str:
        """The model's chat template, or, where it has none, BOS and the two texts with blank lines between."""
        if self.inner.chat_template is None:
            texts = [text for text in (system, user) if text]
            return (self.inner.bos_token or "") + "\n\n".join(texts) + "\n\n"
        messages = [{"role": "user", "content": user}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        return cast(str, self.inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


class ModelRunner:
    """A loaded model with what Kedge derives from it. `forward` is the only place where it runs."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises `UnsupportedModel` for a model that does not compute the same with Kedge's attention."""
        self.model = model
        self.graphs: StepGraphs | None = None
        """Of the storage of the engine that runs it, where that has any"""
        config = model.config.get_text_config()
        self.spec = KVSpec.from_config(model.config, dtype=model.dtype)
        self.device = model.device
        self.vocab_size: int = config.vocab_size
        self.max_positions = longest(config)
        probe.require_interface(type(model))
        with probe.refusing(model.config.model_type):
            self._prepare(config._attn_implementation)
        eos = model.generation_config.eos_token_id if model.generation_config else config.eos_token_id
        self.eos_token_ids = frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])

    def _prepare(self, own_attention: str) -> None:
        """Give the model Kedge's attention for good, unless it is refused."""
        self.model.set_attn_implementation(attention.NAME)
        try:
            self._check()
        except BaseException:
            self.model.set_attn_implementation(own_attention)
            raise

    def _check(self) -> None:
        """Read what depends on the model's code, and require that it computes the same with Kedge's attention."""
        self.rotary = Rotary(_rotary_module(self.model), self.max_positions, self.device)
        probe.require_same(self)
        masks.require_same(self)
        self.refusal = translation_refusal(self.model.config) or probe.foreign_rotation(self)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Writes the KV of all tokens of the batch; logits [rows wanted, vocab] as float32."""
        replayed = self.graphs.replay(batch) if self.graphs else None
        return self.run(batch) if replayed is None else replayed

    def run(self, batch: Pass) -> Tensor:
        """The same, of any pass, kernel by kernel as Python starts them."""
        out = self.model(
            input_ids=batch.tokens[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.logits_rows,
            kedge=batch,
        )
        return out.logits[0].float()


def _rotary_module(model: PreTrainedModel) -> nn.Module:
    """Return what gives all layers their cosines and sines. Raises `UnsupportedModel` where there is no such module."""
    module = getattr(model.base_model, "rotary_emb", None)
    if module is None:
        raise UnsupportedModel("model_type", model.config.model_type, "it has no rotary module for all layers")
    return cast(nn.Module, module)
