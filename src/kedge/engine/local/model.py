"""Loading a Transformers model as it is, and running one flattened batch through it."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kedge.engine.local import attention
from kedge.engine.local.attention import Batch, Pass
from kedge.engine.local.graphs import StepGraphs
from kedge.engine.local.spelling import Spelling
from kedge.errors import CorruptWeights, ModelNotFound, UnsupportedModel
from kedge.kv.rotary import Rotary
from kedge.kv.spec import KVSpec, translation_refusal
from kedge.types import Tokens


def load(path: Path, dtype: torch.dtype | str, device: torch.device) -> PreTrainedModel:
    """Loads weights and config from a folder. Raises `ModelNotFound`, `CorruptWeights` or `UnsupportedModel`."""
    config = read_config(path)
    KVSpec.from_config(config)
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
    """A folder's config. Raises `ModelNotFound`, or `UnsupportedModel` where Transformers does not know it."""
    if not (path / "config.json").is_file():
        raise ModelNotFound("model", str(path), "no such folder, or no config.json in it")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, json.JSONDecodeError, KeyError, ValueError) as error:
        raise UnsupportedModel("model", str(path), f"its config cannot be read: {error}") from error


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
        self.model = model
        self.graphs: StepGraphs | None = None
        """Of the storage of the engine that runs it, where that has any"""
        model.set_attn_implementation(attention.NAME)
        config = model.config.get_text_config()
        self.spec = KVSpec.from_config(config, dtype=model.dtype)
        self.device = model.device
        self.vocab_size: int = config.vocab_size
        self.max_positions: int = config.max_position_embeddings
        self._rotary_emb: nn.Module = cast(nn.Module, model.base_model.rotary_emb)
        self.rotary = Rotary(self._rotary_emb, self.max_positions, model.device)
        self.refusal = translation_refusal(config) or self._foreign_rotation()
        eos = model.generation_config.eos_token_id if model.generation_config else config.eos_token_id
        self.eos_token_ids = frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])

    def _foreign_rotation(self) -> str | None:
        """Compares our rotation with the family's own on random keys, so that no list of names decides."""
        apply = getattr(import_module(type(self.model).__module__), "apply_rotary_pos_emb", None)
        if apply is None:
            return "its rotary embedding cannot be checked against Kedge's"
        keys = torch.randn(1, 3, 1, self.spec.head_dim, device=self.device)
        positions = torch.tensor([0, 1, 5], device=self.device)
        cos, sin = self._rotary_emb(keys, position_ids=positions[None])
        theirs = apply(keys.transpose(1, 2), keys.transpose(1, 2), cos, sin)[1].transpose(1, 2)
        ours = torch.empty_like(keys)
        self.rotary.rotate(keys, positions, out=ours)
        same = theirs.shape == ours.shape and torch.allclose(ours, theirs, atol=1e-4)
        return None if same else "it pairs the dimensions of a key in another way"

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
