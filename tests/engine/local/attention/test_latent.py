"""Attention over latents against attention over the keys and values of all heads that follow from them."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from kedge.engine.local.attention.latent import LatentWeights, latent_of, rows_of, unwatch, watch
from kedge.errors import UnsupportedModel

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


def softmax(scores: Tensor) -> Tensor:
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


@pytest.mark.parametrize("with_head", [False, True], ids=["as tokens", "as a single head"])
def test_attention_over_rows_is_that_over_keys_and_values(module: Expanding, with_head: bool) -> None:
    latents, rotated = inputs()
    key, value = module(latents[:, None] if with_head else latents, rotated)
    query = torch.randn(1, HEADS, TOKENS, UNROTATED + ROTATED).double()
    expected = (softmax(query @ key.transpose(2, 3)) @ value).transpose(1, 2)
    latent, rows = rows_of(module, key, value)
    assert rows.shape == (TOKENS, 1, RANK + ROTATED)
    one = rows.transpose(0, 1)
    out = softmax(latent.absorbed(query[0]) @ one.transpose(1, 2)) @ one
    torch.testing.assert_close(latent.projected(out.transpose(0, 1)), expected[0], atol=1e-10, rtol=1e-10)


def test_rows_are_expanded_to_the_keys_and_values_of_some_heads(module: Expanding) -> None:
    key, value = module(*inputs())
    latent, rows = rows_of(module, key, value)
    keys, values = latent.expanded(rows[:, 0], slice(2, 5))
    torch.testing.assert_close(keys, key[0, 2:5].transpose(0, 1))
    torch.testing.assert_close(values[..., :VALUE], value[0, 2:5].transpose(0, 1))
    assert values.shape == keys.shape


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


def test_rows_explain_their_keys_and_values_and_no_others(module: Expanding) -> None:
    key, value = module(*inputs())
    latent = latent_of(module)
    rows = latent.rows(key, value)
    assert latent.explains(rows, key, value, 1e-9)
    other = value.clone()
    other[0, 3, 2] += 1
    assert not latent.explains(rows, key, other, 1e-9)
    turned = key.clone()
    turned[0, 1, :, UNROTATED:] *= 2  # a rotated part of a head's own
    assert not latent.explains(rows, turned, value, 1e-9)


def test_rows_that_save_too_little_explain_nothing() -> None:
    module = Expanding()
    module.kv_b_proj = nn.Linear(8 * RANK, HEADS * (UNROTATED + VALUE), bias=False)
    watch(module)
    key, value = module(torch.randn(1, TOKENS, 8 * RANK), torch.randn(1, 1, TOKENS, ROTATED))
    latent = latent_of(module)
    assert not latent.explains(latent.rows(key, value), key, value, 1e-3)


def test_latents_are_those_of_the_last_call_and_are_given_once(module: Expanding) -> None:
    (first, rotated), (second, _) = inputs(), inputs()
    module(first, rotated)
    key, value = module(second, rotated)
    _, rows = rows_of(module, key, value)
    assert torch.equal(rows[:, 0, :RANK], second[0])
    with pytest.raises(UnsupportedModel, match="follow from no latent"):
        rows_of(module, key, value)


@pytest.mark.parametrize("tokens", [TOKENS - 1, 2 * TOKENS])
def test_keys_of_other_tokens_have_no_rows(module: Expanding, tokens: int) -> None:
    module(*inputs())
    key, value = torch.zeros(1, HEADS, tokens, UNROTATED + ROTATED), torch.zeros(1, HEADS, tokens, VALUE)
    with pytest.raises(UnsupportedModel, match="follow from no latent"):
        rows_of(module, key, value)


@pytest.mark.parametrize(("heads", "dim"), [(5, VALUE), (HEADS, UNROTATED + VALUE), (HEADS, 1)])
def test_shapes_that_do_not_follow_from_the_projection_have_no_rows(module: Expanding, heads: int, dim: int) -> None:
    module(*inputs())
    with pytest.raises(UnsupportedModel, match="follow from no latent"):
        rows_of(module, torch.zeros(1, heads, TOKENS, UNROTATED + ROTATED), torch.zeros(1, heads, TOKENS, dim))


def test_a_projection_with_a_bias_or_of_another_kind_is_not_watched() -> None:
    class Other(nn.Linear):
        pass

    biased, other = Expanding(bias=True), Expanding()
    other.kv_b_proj = Other(RANK, HEADS * (UNROTATED + VALUE), bias=False)
    for module in (biased, other, nn.Linear(2, 2)):
        watch(module)
        assert latent_of(module) is None
        with pytest.raises(UnsupportedModel, match="follow from no latent"):
            rows_of(module, torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))


def test_a_projection_is_watched_once_and_left_as_it_was(module: Expanding) -> None:
    before = latent_of(module)
    watch(module)
    assert latent_of(module) is before
    assert len(module.kv_b_proj._forward_pre_hooks) == 1
    for _ in range(2):
        unwatch(module)
        assert latent_of(module) is None
        assert not module.kv_b_proj._forward_pre_hooks


def test_a_copy_of_a_model_notes_its_own_latents(module: Expanding) -> None:
    other = deepcopy(module)
    latents, rotated = inputs()
    key, value = other(latents, rotated)
    _, rows = rows_of(other, key, value)
    assert torch.equal(rows[:, 0, :RANK], latents[0])
    with pytest.raises(UnsupportedModel, match="follow from no latent"):
        rows_of(module, key, value)
