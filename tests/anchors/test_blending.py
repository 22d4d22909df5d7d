from __future__ import annotations

import pytest
import torch

from kedge.anchors.anchor import Anchor, AnchorId, KeyBlock, Query
from kedge.anchors.estimators import Interpolate, Token, anchor_weights
from tests.anchors.helpers import generator


def block(lengths: list[int], dim: int = 6) -> KeyBlock:
    noise = generator(0)
    return KeyBlock(
        [Anchor(AnchorId(i), (i,) * n, torch.randn(n, dim, generator=noise)) for i, n in enumerate(lengths)]
    )


def query(tokens: int, seed: int = 1, dim: int = 6) -> Query:
    return Query((0,) * tokens, torch.randn(tokens, dim, generator=generator(seed)), 1e-3)


def column_keys(stored: KeyBlock, columns: torch.Tensor) -> torch.Tensor:
    return stored._matrix[columns, :-1]


def test_anchor_weights_mean_the_same_at_any_scale() -> None:
    near = torch.tensor([960.0, 950.0, 958.0])
    torch.testing.assert_close(anchor_weights(near, 10.0), anchor_weights(near / 1000, 10.0))
    assert float(anchor_weights(near, 10.0).max()) < 0.4  # softmax(-d) would put 0.9996 on one of them
    assert float(anchor_weights(torch.tensor([960.0, 100.0, 958.0]), 10.0).max()) > 0.99
    assert anchor_weights(torch.zeros(4), 10.0).tolist() == [0.25] * 4


def test_interpolate_takes_the_same_place_of_every_anchor_that_is_long_enough() -> None:
    stored, asked = block([3, 7, 5]), query(5)
    proposal = Interpolate(10.0).propose(asked, stored, None)
    assert proposal.columns.tolist() == [[3 + t, 10 + t] for t in range(5)]
    distances = stored.aligned(asked, torch.tensor([1, 2])).sum(1).sqrt()
    wanted = torch.softmax(-10 * distances / distances.mean(), dim=0)
    torch.testing.assert_close(proposal.weights, wanted.expand(5, 2))
    assert proposal.mass[0] == 0
    torch.testing.assert_close(proposal.mass[1:], wanted)
    assert torch.equal(proposal.after, proposal.mass)


def test_token_takes_the_most_similar_tokens_at_any_place() -> None:
    stored, asked = block([30, 20]), query(9)
    proposal = Token(4, 0.05, 10.0).propose(asked, stored, None)
    keys = column_keys(stored, torch.arange(50))
    squared = torch.cdist(asked.keys, keys).square()
    best = squared.topk(4, dim=1, largest=False)
    assert torch.equal(proposal.columns, best.indices)
    torch.testing.assert_close(proposal.distance, (best.values[:, 0] / squared.mean()).sqrt())
    assert float(proposal.mass.sum()) == pytest.approx(1)


def test_token_weighs_by_ordinary_kriging() -> None:
    stored, asked = block([30, 20]), query(9)
    found = Token(4, 0.2, 10.0).propose(asked, stored, None)
    keys = column_keys(stored, torch.arange(50)).double()
    scale = (torch.cdist(asked.keys.double(), keys).square().mean() / 2).sqrt()
    for columns, weights, key in zip(found.columns, found.weights, asked.keys.double(), strict=True):
        system = torch.ones(5, 5, dtype=torch.float64)
        system[:4, :4] = (-torch.cdist(keys[columns], keys[columns]) / scale).exp() + 0.2 * torch.eye(4)
        system[4, 4] = 0
        to = torch.cat([(-(keys[columns] - key).norm(dim=1) / scale).exp(), torch.ones(1)])
        torch.testing.assert_close(weights.double(), torch.linalg.solve(system, to)[:4], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.weights.sum(1), torch.ones(9))


def test_tokens_that_are_alike_share_one_weight_and_those_far_away_are_averaged() -> None:
    keys = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    stored = KeyBlock([Anchor(AnchorId(i), (i,), key[None]) for i, key in enumerate(keys)])
    between, far = (Query((9,), torch.tensor([key]), 1e-3) for key in ([0.5, 0.5], [-900.0, -900.0]))
    weights = dict(zip((0, 1, 2), Token(3, 1e-3, 10.0).propose(between, stored, None).mass.tolist(), strict=True))
    assert weights[0] == pytest.approx(weights[1], rel=1e-3) and weights[0] + weights[1] == pytest.approx(
        weights[2], rel=0.01
    )
    assert Token(3, 1e3, 10.0).propose(far, stored, None).mass.tolist() == pytest.approx([1 / 3] * 3, rel=0.01)


def test_token_serves_values_longer_than_every_anchor() -> None:
    assert Token(8, 0.05, 10.0).propose(query(50), block([4, 3]), None).columns.shape == (50, 7)


def test_token_weights_the_prefix_by_the_last_tokens() -> None:
    stored = block([40, 30])
    ends = column_keys(stored, torch.arange(54, 70))  # the last 16 tokens of the second
    asked = Query((0,) * 20, torch.cat([column_keys(stored, torch.arange(4)), ends]), 1e-3)
    proposal = Token(1, 0.05, 10.0).propose(asked, stored, None)
    assert proposal.mass.tolist() == pytest.approx([0.2, 0.8])
    assert float(proposal.after[1]) > 0.99


@pytest.mark.parametrize("estimator", [Token(8, 0.05, 10.0), Interpolate(10.0)])
def test_a_repeat_takes_one_anchor_alone(estimator: Token | Interpolate) -> None:
    stored = block([6, 8, 6])
    asked = Query((2,) * 6, column_keys(stored, torch.arange(14, 20)), 1e-3)
    proposal = estimator.propose(asked, stored, 2)
    assert proposal.columns.tolist() == [[14 + t] for t in range(6)]
    assert torch.equal(proposal.weights, torch.ones(6, 1))
    assert proposal.mass.tolist() == proposal.after.tolist() == [0, 0, 1]
    assert not proposal.distance.any()


@pytest.mark.parametrize("estimator", [Token(8, 0.05, 10.0), Interpolate(10.0)])
def test_one_token_that_equals_all_there_is(estimator: Token | Interpolate) -> None:
    ones = torch.ones(1, 6)
    stored = KeyBlock([Anchor(AnchorId(i), (i,), ones) for i in range(3)])
    proposal = estimator.propose(Query((9,), ones, 1e-3), stored, None)
    torch.testing.assert_close(proposal.weights, torch.full((1, 3), 1 / 3))
    assert torch.isfinite(proposal.distance).all()
