"""What Transformers computes for some positions of a prompt over given KV, whatever kinds of layers a model has."""

import importlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from kedge.kv.segment import KVSegment
from kedge.reuse.holes import Holes, joined

FULL = "full_attention"


class HolesCache:
    """A cache of KV of all positions of a prompt, into which Transformers puts the KV of holes."""

    def __init__(self, keys: Tensor, values: Tensor, at: Tensor) -> None:
        """`keys` (rotated) and `values` are [layers, kv_heads, tokens, head_dim]; `at` are the positions of holes."""
        self.keys, self.values, self._at = keys.clone(), values.clone(), at

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keep the KV of the holes in a layer; all KV of the layer."""
        self.keys[layer][:, self._at], self.values[layer][:, self._at] = keys[0], values[0]
        return self.keys[layer][None], self.values[layer][None]

    def get_seq_length(self, *_: Any) -> int:
        return 0


class Reference:
    """A model as Transformers runs it. KV is all of a prompt's, keys unrotated."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._config = model, model.config
        self._kinds = getattr(self._config, "layer_types", None) or [FULL] * self._config.num_hidden_layers

    @torch.no_grad()
    def compute(self, prompt: Sequence[int], kv: KVSegment, holes: Holes) -> tuple[KVSegment, Tensor]:
        """Compute the positions in `holes` over `kv` elsewhere: all KV, and the last log-probabilities."""
        at = torch.tensor([position for hole in joined(holes) for position in hole])
        cache = HolesCache(self._turned(kv.keys.transpose(1, 2)), kv.values.transpose(1, 2), at)
        masks = self._masks(at, len(prompt))
        logits = self._model(
            input_ids=torch.tensor(prompt)[at][None],
            position_ids=at[None],
            attention_mask=masks if len({*self._kinds}) > 1 else masks[FULL],
            past_key_values=cache,
        ).logits
        keys = self._turned(cache.keys, back=True).transpose(1, 2)
        return KVSegment(keys, cache.values.transpose(1, 2)), logits[0, -1].log_softmax(-1)

    def dense(self, prompt: Sequence[int]) -> tuple[KVSegment, Tensor]:
        """Compute all positions of a prompt."""
        return self.compute(prompt, self.empty(len(prompt)), (range(len(prompt)),))

    def empty(self, length: int) -> KVSegment:
        """KV of so many tokens, all zero."""
        shape = len(self._kinds), length, self._config.num_key_value_heads, self._config.head_dim
        return KVSegment(torch.zeros(shape), torch.zeros(shape))

    def _masks(self, at: Tensor, length: int) -> dict[str, Tensor]:
        distance = at[:, None] - torch.arange(length)[None]
        seen = {FULL: distance >= 0}
        seen["sliding_attention"] = seen[FULL] & (distance < (getattr(self._config, "sliding_window", None) or length))
        hidden = torch.finfo(torch.float32).min
        return {kind: torch.zeros(mask.shape).masked_fill(~mask, hidden)[None, None] for kind, mask in seen.items()}

    def _turned(self, keys: Tensor, back: bool = False) -> Tensor:
        """Keys [layers, kv_heads, tokens, head_dim], each layer rotated by the model's own function, or rotated
        back.
        """
        rotate = importlib.import_module(type(self._model).__module__).apply_rotary_pos_emb
        positions = torch.arange(keys.shape[2])[None]
        turned = []
        for layer, kind in zip(keys, self._kinds, strict=True):
            by_kind = [kind] if self._config.model_type == "gemma3_text" else []
            cos, sin = self._model.model.rotary_emb(keys, positions, *by_kind)
            if back:
                scale = cos[0, 0, 0] ** 2 + sin[0, 0, 0] ** 2
                cos, sin = cos / scale, -sin / scale
            turned.append(rotate(layer[None], layer[None], cos, sin)[1][0])
        return torch.stack(turned)


@cache
def reference(folder: Path) -> Reference:
    """The model of a folder, loaded once."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return Reference(model.eval())


def difference(one: KVSegment, other: KVSegment, spans: Holes | None = None) -> float:
    """The largest difference of two prompts' KV, at the positions in `spans`, else at all."""
    at = torch.tensor([position for span in spans for position in span]) if spans else torch.arange(one.tokens)
    pairs = (one.keys, other.keys), (one.values, other.values)
    return max(float((a[:, at] - b[:, at]).abs().max()) for a, b in pairs)
