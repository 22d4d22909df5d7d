"""The regression against scikit-free twins: a loop over heads with `torch.linalg.lstsq`, and exact linear data."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.anchors.sites import Ridge
from tests.anchors.helpers import generator

SHAPE = (2, 2, 3, 4)
WIDTH = 2 * 2 * 3 * 4


def rows(tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, WIDTH, generator=generator(seed))


def twin(base: torch.Tensor, offset: torch.Tensor, asked: torch.Tensor, strength: float) -> torch.Tensor:
    """Least squares per group, the penalty written as more observations."""
    out = torch.empty_like(asked)
    for start in range(0, WIDTH, 4):
        x, y = base[:, start : start + 4].double(), offset[:, start : start + 4].double()
        held = (strength * x.square().sum(0).mean()).sqrt()
        penalty = torch.cat([held * torch.eye(4, dtype=x.dtype), torch.zeros(4, 1, dtype=x.dtype)], dim=1)
        left = torch.cat([torch.cat([x, torch.ones_like(x[:, :1])], dim=1), penalty])
        weights = torch.linalg.lstsq(left, torch.cat([y, torch.zeros(4, 4, dtype=x.dtype)])).solution
        new = asked[:, start : start + 4].double()
        out[:, start : start + 4] = (torch.cat([new, torch.ones_like(new[:, :1])], dim=1) @ weights).float()
    return out


@settings(max_examples=20, deadline=None)
@given(parts=st.lists(st.integers(1, 12), min_size=1, max_size=4), seed=st.integers(0, 10**6))
def test_it_is_least_squares_with_a_penalty_however_the_samples_came(parts: list[int], seed: int) -> None:
    base, offset, asked = rows(sum(parts), seed), rows(sum(parts), seed + 1), rows(5, seed + 2)
    ridge = Ridge(SHAPE, 0.005, base.device)
    for x, y in zip(base.split(parts), offset.split(parts), strict=True):
        ridge.add(x, y)
    torch.testing.assert_close(ridge.predict(asked), twin(base, offset, asked, 0.005), atol=2e-4, rtol=2e-3)


def test_a_linear_relation_is_found() -> None:
    weights, shift = torch.randn(12, 4, 4, generator=generator(0)), torch.randn(WIDTH, generator=generator(1))

    def real(base: torch.Tensor) -> torch.Tensor:
        return torch.einsum("tgd,gde->tge", base.view(-1, 12, 4), weights).flatten(1) + shift

    ridge = Ridge(SHAPE, 1e-9, weights.device)
    ridge.add(rows(40, 2), real(rows(40, 2)))
    torch.testing.assert_close(ridge.predict(rows(6, 3)), real(rows(6, 3)), atol=1e-4, rtol=1e-4)
    difference = rows(6, 4) - rows(6, 5)
    torch.testing.assert_close(
        ridge.predict_change(difference), real(rows(6, 4)) - real(rows(6, 5)), atol=1e-4, rtol=1e-4
    )


def test_heads_do_not_mix() -> None:
    base, offset = rows(30, 0), rows(30, 1)
    one, other = Ridge(SHAPE, 0.01, base.device), Ridge(SHAPE, 0.01, base.device)
    one.add(base, offset)
    base[:, 4:] = 7 * base[:, 4:] + 1
    other.add(base, offset)
    torch.testing.assert_close(one.predict(rows(3, 2))[:, :4], other.predict(rows(3, 2))[:, :4])


def test_a_stronger_penalty_leaves_only_the_mean() -> None:
    base, offset = rows(50, 0), rows(50, 1)
    ridge = Ridge(SHAPE, 1e9, base.device)
    ridge.add(base, offset)
    torch.testing.assert_close(ridge.predict(rows(4, 2)), offset.mean(0).expand(4, -1), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("tokens", [1, 3])
def test_base_kv_of_nothing_but_zeros_is_no_accident(tokens: int) -> None:
    ridge = Ridge(SHAPE, 0.005, torch.device("cpu"))
    assert not ridge.predict(rows(2, 0)).any()
    ridge.add(torch.zeros(tokens, WIDTH), torch.ones(tokens, WIDTH))
    torch.testing.assert_close(ridge.predict(torch.zeros(2, WIDTH)), torch.ones(2, WIDTH))


def test_memory_does_not_grow() -> None:
    ridge = Ridge(SHAPE, 0.005, torch.device("cpu"))
    before = ridge.nbytes
    ridge.add(rows(500, 0), rows(500, 1))
    assert ridge.nbytes == before == 12 * (25 + 2 * 20) * 4
