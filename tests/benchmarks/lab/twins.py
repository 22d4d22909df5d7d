"""Plain PyTorch twins of methods that mix reused KV with recomputed KV."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kedge.kv.segment import KVSegment
from kedge.types import Tokens
from tests.benchmarks.driver import ComponentsDriver


@torch.no_grad()
def plain_prefill(driver: ComponentsDriver, ids: Tokens) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Keys (rotated to 0 …) and values [layers, tokens, kv_heads, head_dim] of a plain prefill by Transformers, and
    each layer's attention [heads, queries, keys].
    """
    cache, model = DynamicCache(), driver.runner.model
    model.set_attn_implementation("eager")
    out = model(torch.tensor([ids]), past_key_values=cache, output_attentions=True)
    model.set_attn_implementation("kedge")
    keys, values = (
        torch.stack([getattr(one, part)[0] for one in cache.layers]).transpose(1, 2) for part in ("keys", "values")
    )
    return keys, values, [one[0] for one in out.attentions]


def moved(driver: ComponentsDriver, kv: KVSegment, start: int) -> KVSegment:
    """Return KV with its unrotated keys rotated to the positions from `start` on."""
    keys = torch.empty_like(kv.keys)
    driver.runner.rotary.rotate(kv.keys, slice(start, start + kv.tokens), out=keys)
    return KVSegment(keys, kv.values)


@torch.no_grad()
def recomputed(
    driver: ComponentsDriver, ids: Tokens, reused: KVSegment, computed: Collection[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values where all positions run through all layers, but only `computed` ones leave their KV; the others
    have that of `reused` (keys rotated) for everyone who attends to them.
    """
    model = driver.runner.model.model
    hidden, positions = model.embed_tokens(torch.tensor([ids])), torch.arange(len(ids))[None]
    turns = model.rotary_emb(hidden, position_ids=positions)
    keys, values, rows = reused.keys.clone(), reused.values.clone(), sorted(computed)
    for number, layer in enumerate(model.layers):
        attention, normed = layer.self_attn, layer.input_layernorm(hidden)
        query, key, value = (
            getattr(attention, f"{part}_proj")(normed).view(1, len(ids), -1, attention.head_dim).transpose(1, 2)
            for part in "qkv"
        )
        query, key = apply_rotary_pos_emb(query, key, *turns)
        keys[number, rows], values[number, rows] = (x[0].transpose(0, 1)[rows] for x in (key, value))
        groups = query.shape[1] // keys.shape[2]
        k, v = (x[number].transpose(0, 1).repeat_interleave(groups, 0)[None] for x in (keys, values))
        out = scaled_dot_product_attention(query, k, v, is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + attention.o_proj(out)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return keys, values
