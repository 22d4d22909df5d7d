"""CacheBlend against a twin that carries all tokens through all layers and overwrites KV by the paper's rule."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from benchmarks.lab.methods import Ablation, CacheBlend, NoAnchors
from kedge.engine.local.components import EngineComponents
from kedge.errors import ConfigError
from kedge.kv.segment import KVSegment
from kedge.types import ReuseMode, Source
from tests.benchmarks.driver import ComponentsDriver
from tests.benchmarks.lab.twins import moved
from tests.engine.local.test_translation import request, tokens

ASKED = request(tokens(50, 30), tokens(51, 12))
REUSED = list(range(20, 75))


def served(assembler: object, family: str = "llama"):  # noqa: ANN201
    driver = ComponentsDriver(EngineComponents(NoAnchors, assembler), family)
    driver.serve(request(tokens(60, 30), tokens(61, 12)))
    driver.serve(request(tokens(50, 30), tokens(51, 12), agent="critic"))  # leaves base KV behind
    return (driver, *driver.serve(ASKED))


@torch.no_grad()
def twin(
    driver: ComponentsDriver, reused: KVSegment, ratios: dict[int, float]
) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Chosen positions, keys and values, from KV whose `REUSED` positions hold what is reused (keys rotated)."""
    model = driver.runner.model.model
    ids = torch.tensor([ASKED.tokens])
    hidden, positions = model.embed_tokens(ids), torch.arange(ids.shape[1])[None]
    turns = model.rotary_emb(hidden, position_ids=positions)
    keys, values = reused.keys.clone(), reused.values.clone()
    going = set(REUSED)
    for number, layer in enumerate(model.layers):
        attention, normed = layer.self_attn, layer.input_layernorm(hidden)
        query, key, value = (
            getattr(attention, f"{part}_proj")(normed).view(1, ids.shape[1], -1, attention.head_dim).transpose(1, 2)
            for part in "qkv"
        )
        query, key = apply_rotary_pos_emb(query, key, *turns)
        fresh_k, fresh_v = key[0].transpose(0, 1), value[0].transpose(0, 1)
        if number in ratios:
            far = {
                p: float(
                    (fresh_k[p] - keys[number, p]).square().sum() + (fresh_v[p] - values[number, p]).square().sum()
                )
                for p in going
            }
            going = set(sorted(far, key=far.__getitem__)[-math.ceil(ratios[number] * len(REUSED)) :])
        for p in range(ids.shape[1]):
            if p in going or p not in REUSED:
                keys[number, p], values[number, p] = fresh_k[p], fresh_v[p]
        groups = query.shape[1] // keys.shape[2]
        k, v = (x[number].transpose(0, 1).repeat_interleave(groups, 0)[None] for x in (keys, values))
        out = scaled_dot_product_attention(query, k, v, is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + attention.o_proj(out)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return sorted(going), keys, values


@pytest.mark.parametrize("ratios", [(0.4, 0.2), (0.5,), (0.2, 0.2)])
def test_choice_and_kv_are_those_of_the_layerwise_forward(ratios: tuple[float, ...]) -> None:
    driver, sequence, kv = served(CacheBlend(ratios))
    _, _, plain = served(Ablation(values=False, prefixes=False))
    schedule = {1: ratios[0], 2: ratios[-1]}
    if len(ratios) == 1:
        del schedule[2]
    chosen, keys, values = twin(driver, moved(driver, plain, 0), schedule)
    computed = [p for p in sequence.plan.computed if p in REUSED]
    assert computed == chosen
    assert len(computed) == math.ceil(ratios[-1] * len(REUSED))
    got = moved(driver, kv, 0)
    torch.testing.assert_close(got.keys, keys, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(got.values, values, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_recomputing_everything_is_dense_prefill(family: str) -> None:
    driver, sequence, kv = served(CacheBlend((1.0,)), family)
    assert sequence.plan.computed == list(range(76))
    _, dense = driver.serve(replace(ASKED, reuse=ReuseMode.OFF, request_id="dense"))
    torch.testing.assert_close(kv.keys, dense.keys, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(kv.values, dense.values, atol=1e-4, rtol=1e-4)


def test_it_is_nearer_to_dense_than_rotation_only_and_says_what_it_computed() -> None:
    driver, sequence, kv = served(CacheBlend())
    _, dense = driver.serve(replace(ASKED, reuse=ReuseMode.OFF, request_id="dense"))
    _, _, plain = served(Ablation(values=False, prefixes=False))
    errors = [float((one.values - dense.values).norm()) for one in (kv, plain)]
    assert errors[0] < 0.95 * errors[1]
    receipt = sequence.receipt()
    assert receipt.translated == len(REUSED) - math.ceil(0.2 * len(REUSED))
    assert receipt.prompt_tokens == receipt.exact + receipt.translated + receipt.computed
    assert {span.source for span in sequence.plan.spans} == {Source.TRANSLATED, Source.COMPUTED}


def test_what_cannot_be_reused_is_computed_like_the_prefix() -> None:
    driver = ComponentsDriver(EngineComponents(NoAnchors, CacheBlend()))
    driver.serve(request(tokens(60, 30), tokens(61, 12)))
    asked = request(tokens(60, 30), tokens(62, 12))  # the hint is new
    sequence, _ = driver.serve(asked)
    hint = set(range(59, 71))
    assert hint <= set(sequence.plan.computed)
    assert sequence.plan.translates


@pytest.mark.parametrize("ratios", [(), (0.2, 0.3), (0.0,), (1.5,)])
def test_bad_ratios_are_named(ratios: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="cacheblend.ratios"):
        CacheBlend(ratios)
