"""Attention over latents against attention over the keys and values of all heads that follow from them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from kedge.engine.local.attention.latent import LatentWeights, latent_of, rows_of, watch
from kedge.engine.local.model import probe
from kedge.engine.local.model.layout import attention
from kedge.engine.local.model.loading import checked_runner, model_digest
from kedge.engine.local.model.runner import ModelRunner
from kedge.engine.local.sequence import Sequence, Work, flatten
from kedge.errors import UnsupportedModel
from kedge.kv.segment import KVSegment
from kedge.kv.storage import SlotTable
from kedge.types import Namespace
from tests.engine.local.conftest import engine_of
from tests.engine.local.model.test_architectures import model_of
from tests.engine.local.model.test_graphs import storage_of
from tests.engine.local.test_engine import greedy, prompt
from tests.engine.local.test_engine import request as plain

HEADS, RANK, ROTATED, UNROTATED, VALUE = 6, 20, 4, 10, 14
TOKENS = 7


class Expanding(nn.Module):
    """The part of an attention module that computes keys and values from latents."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(RANK, HEADS * (UNROTATED + VALUE), bias=bias)

    def forward(self, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [1, heads, tokens, dim] of latents [..., tokens, rank]."""
        both = self.kv_b_proj(latents).view(1, -1, HEADS, UNROTATED + VALUE).transpose(1, 2)
        unrotated, value = both.split([UNROTATED, VALUE], dim=-1)
        return torch.cat([unrotated, rotated.expand(-1, HEADS, -1, -1)], dim=-1), value


@pytest.fixture
def module() -> Expanding:
    torch.manual_seed(0)
    model = Expanding().double()
    watch(model)
    return model.requires_grad_(requires_grad=False)


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(1, TOKENS, RANK).double(), torch.randn(1, 1, TOKENS, ROTATED).double()


@pytest.mark.parametrize("context", [100, 1000])
def test_expanding_is_worth_it_from_the_number_of_queries_on_that_takes_less_arithmetic(context: int) -> None:
    """DeepSeek-V3's sizes: per token of the context, expanding multiplies by the weights of keys and values; a pair of
    query and token takes a score and a weighted sum, of rows or of keys and values.
    """
    rank, rotated, unrotated, value_dim = 512, 64, 128, 128
    latent = LatentWeights(torch.empty(1, unrotated + value_dim, rank), value_dim)

    def arithmetic(queries: int) -> tuple[float, float]:
        pairs = queries * (context - queries / 2)
        of_rows, of_heads = (rank + rotated) + rank, (unrotated + rotated) + value_dim
        return pairs * of_rows, context * rank * (unrotated + value_dim) + pairs * of_heads

    for queries in (1, 2, 64, 150, 170, 180, 200, 400, context):
        if queries <= context:
            by_rows, by_heads = arithmetic(queries)
            assert latent.is_worth_expanding(queries, context, rank + rotated) is (by_heads < by_rows)


def test_latents_are_those_of_the_last_call_and_are_given_once(module: Expanding) -> None:
    (first, rotated), (second, _) = inputs(), inputs()
    module(first, rotated)
    key, value = module(second, rotated)
    _, rows = rows_of(module, key, value)
    assert torch.equal(rows[:, 0, :RANK], second[0])
    with pytest.raises(UnsupportedModel, match="follow from no latent"):
        rows_of(module, key, value)


@pytest.mark.parametrize(
    ("heads", "tokens", "dim"),
    [
        (HEADS, TOKENS - 1, VALUE),
        (HEADS, 2 * TOKENS, VALUE),
        (5, TOKENS, VALUE),
        (HEADS, TOKENS, 24),
        (HEADS, TOKENS, 1),
    ],
)
def test_keys_and_values_that_do_not_follow_from_the_projection_have_no_rows(
    module: Expanding, heads: int, tokens: int, dim: int
) -> None:
    module(*inputs())
    with pytest.raises(UnsupportedModel, match="follow from no latent"):
        rows_of(module, torch.zeros(1, heads, tokens, UNROTATED + ROTATED), torch.zeros(1, heads, tokens, dim))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    **{name: partial(model_of, name) for name in ("DeepSeek-V2, MLA", "GLM-4.7-Flash, MLA", "MiniCPM3, MLA")},
    "16 heads and YaRN": partial(model_of, "DeepSeek-V3, MLA and YaRN", num_attention_heads=16, num_key_value_heads=16),
}
PLACE, COUNT = 37, 45
"""Where text is translated to, and how many tokens of it"""


def both(name: str) -> tuple[ModelRunner, ModelRunner]:
    """One model that keeps latents, and that keeps the KV of all heads."""
    one = MODELS[name]()
    return checked_runner(one), ModelRunner(one, latent=False)


@pytest.mark.parametrize("name", MODELS)
def test_a_token_takes_at_most_a_quarter_of_the_memory(name: str) -> None:
    latents, heads = both(name)
    config = latents.model.config
    kept = config.kv_lora_rank + config.qk_rope_head_dim
    assert latents.spec.bytes_per_token == 3 * kept * 4
    numbers = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    assert 4 * latents.spec.bytes_per_token <= 3 * config.num_attention_heads * numbers * 4
    assert 4 * latents.spec.bytes_per_token < heads.spec.bytes_per_token


class Twin:
    """A storage with one prompt, whose tokens go through the runner at chosen positions."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.table = runner, SlotTable.of([6, 1, 4, 9, 2, 8], 16)
        self.storage = storage_of(runner, 12)

    def run(self, positions: list[int]) -> Tensor:
        """The logits of the last token."""
        tokens = list(prompt(3, max(positions) + 1))
        sequence = Sequence("x", Namespace(""), tokens, self.table)
        return self.runner.forward(flatten([Work(sequence, positions)], self.storage))[-1]


def transformers_cache(runner: ModelRunner, base: KVSegment, offsets: KVSegment) -> DynamicCache:
    """Translation written out: base KV plus offsets from `PLACE` on, rotated as by Transformers, in its own cache."""
    config, model = runner.model.config, runner.model.model
    cos, sin = (x[0] for x in model.rotary_emb(torch.zeros(1), torch.arange(PLACE, PLACE + COUNT)[None]))
    cache, half = DynamicCache(config=config), config.qk_rope_head_dim // 2
    for layer in range(3):
        row = torch.cat([base.values[layer, :, 0], base.keys[layer, :, 0]], dim=-1)
        if layer:
            row = row + torch.cat([offsets.values[layer - 1, :, 0], offsets.keys[layer - 1, :, 0]], dim=-1)
        latent, part = row.split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        turned = part * cos + torch.cat([-part[:, half:], part[:, :half]], dim=-1) * sin
        cache.update(*(pad(x, (0, 0, PLACE, 0))[None, None] for x in (latent, turned)), layer)
    return cache


@pytest.mark.parametrize("name", [name for name in MODELS if name != "DeepSeek-V2, MLA"])  # its neighbours are paired
@torch.inference_mode()
def test_after_translated_latents_transformers_computes_the_same_over_its_own_cache(name: str) -> None:
    runner = checked_runner(MODELS[name]())
    twin = Twin(runner)
    twin.run(list(range(COUNT)))
    base = twin.storage.read(twin.table, 0, COUNT)
    for pool in (twin.storage.keys, twin.storage.values):
        pool.zero_()
    offsets = KVSegment(*(0.3 * torch.randn_like(x[1:]) for x in (base.keys, base.values)))
    twin.storage.write(twin.table, PLACE, base, offsets)
    place = PLACE + COUNT
    with attention(runner.model, "eager"):
        theirs = runner.model(
            input_ids=torch.tensor([[prompt(3, place + 1)[-1]]]),
            position_ids=torch.tensor([[place]]),
            past_key_values=transformers_cache(runner, base, offsets),
        )
    wanted = theirs.logits[0, -1]
    assert (twin.run([place]) - wanted).norm() < 1e-4 * wanted.norm()


def test_what_was_saved_with_the_kv_of_all_heads_is_not_taken_for_latents() -> None:
    latents, heads = both("MiniCPM3, MLA")
    assert model_digest(latents).hexdigest() != model_digest(heads).hexdigest()


def with_bias(layer: Any) -> None:
    before = layer.kv_b_proj
    layer.kv_b_proj = nn.Linear(before.in_features, before.out_features)


def of_another_kind(layer: Any) -> None:
    class Other(nn.Linear):
        pass

    layer.kv_b_proj.__class__ = Other


def with_changed_values(layer: Any, change: Callable[[Tensor], Tensor] = Tensor.tanh) -> None:
    expand = layer.expand_kv

    def changed(*args: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = expand(*args)
        return keys, change(values)

    layer.expand_kv = changed


@pytest.mark.parametrize("change", [with_bias, of_another_kind, with_changed_values])
def test_a_model_of_which_one_layer_is_not_as_expected_keeps_the_kv_of_all_heads(change: Callable[[Any], None]) -> None:
    one = model_of("DeepSeek-V3 and Kimi K2, MLA")
    change(one.model.layers[1].self_attn)
    wanted = greedy(one, prompt(1, 70), 24)
    runner = checked_runner(one)
    assert (runner.spec.latent, runner.spec.kv_heads, runner.refusal) == (0, 4, None)
    assert not any(map(latent_of, one.modules()))
    with engine_of(one) as engine:
        assert engine.submit(plain(prompt(1, 70))).result(60).tokens == wanted


@pytest.mark.parametrize("rank", [64, 31])
def test_a_latent_that_saves_little_or_has_no_halves_is_not_kept(rank: int) -> None:
    runner = checked_runner(model_of("DeepSeek-V3 and Kimi K2, MLA", kv_lora_rank=rank))
    assert (runner.spec.latent, runner.spec.kv_heads, runner.spec.head_dim) == (0, 4, 24)


def test_a_latent_with_which_results_are_wrong_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    """Values that change with the number of tokens are seen by the comparison of prompts only."""
    one = model_of("DeepSeek-V3 and Kimi K2, MLA")
    with_changed_values(one.model.layers[1].self_attn, lambda values: values * (1 if values.shape[2] < 8 else 3))
    assert checked_runner(one).spec.latent == 0
    assert "keys and values of all heads are kept" in caplog.text
    assert not any(map(latent_of, one.modules()))


def test_a_model_that_is_refused_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(runner: ModelRunner) -> None:
        assert runner.spec.latent or not any(map(latent_of, runner.model.modules()))
        raise UnsupportedModel("model_type", "deepseek_v3", "no")

    monkeypatch.setattr(probe, "require_causal_masks", refuse)
    one = model_of("DeepSeek-V3 and Kimi K2, MLA")
    with pytest.raises(UnsupportedModel, match="no"):
        checked_runner(one)
    assert not any(map(latent_of, one.modules()))
    assert one.config._attn_implementation != "kedge"
