import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kedge.anchors.anchor import Anchor, KeyBlock, KeyReader, Query
from kedge.anchors.estimators import Interpolate, Token
from tests.anchors.helpers import DIM, HEADS, generator, random_kv


def anchors(lengths: list[int], dim: int = 6, seed: int = 0) -> list[Anchor]:
    noise = generator(seed)
    return [Anchor(i, (i,) * n, torch.randn(n, dim, generator=noise)) for i, n in enumerate(lengths)]


def block(lengths: list[int]) -> KeyBlock:
    return KeyBlock(anchors(lengths))


def query(tokens: int, seed: int = 1, dim: int = 6) -> Query:
    return Query((0,) * tokens, torch.randn(tokens, dim, generator=generator(seed)), 1e-3)


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


def test_token_takes_the_most_similar_tokens_at_any_place_and_weighs_them_by_ordinary_kriging() -> None:
    stored, asked = block([30, 20]), query(9)
    found = Token(4, 0.2, 10.0).propose(asked, stored, None)
    keys, squared = stored.keys.double(), torch.cdist(asked.keys.double(), stored.keys.double()).square()
    best, scale = squared.topk(4, dim=1, largest=False), (squared.mean() / 2).sqrt()
    assert torch.equal(found.columns, best.indices)
    torch.testing.assert_close(
        found.distance.double(), (best.values[:, 0] / squared.mean()).sqrt(), atol=1e-4, rtol=1e-4
    )
    for columns, weights, key in zip(found.columns, found.weights, asked.keys.double(), strict=True):
        system = torch.ones(5, 5, dtype=torch.float64)
        system[:4, :4] = (-torch.cdist(keys[columns], keys[columns]) / scale).exp() + 0.2 * torch.eye(4)
        system[4, 4] = 0
        to = torch.cat([(-(keys[columns] - key).norm(dim=1) / scale).exp(), torch.ones(1)])
        torch.testing.assert_close(weights.double(), torch.linalg.solve(system, to)[:4], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.weights.sum(1), torch.ones(9))
    assert float(found.mass.sum()) == pytest.approx(1)


def test_token_serves_values_longer_than_every_anchor() -> None:
    assert Token(8, 0.05, 10.0).propose(query(50), block([4, 3]), None).columns.shape == (50, 7)


def test_token_weights_the_prefix_by_the_last_tokens() -> None:
    stored = block([40, 30])
    ends = stored.keys[54:70]  # the last 16 tokens of the second
    asked = Query((0,) * 20, torch.cat([stored.keys[:4], ends]), 1e-3)
    proposal = Token(1, 0.05, 10.0).propose(asked, stored, None)
    assert proposal.mass.tolist() == pytest.approx([0.2, 0.8])
    assert float(proposal.after[1]) > 0.99


@pytest.mark.parametrize("estimator", [Token(8, 0.05, 10.0), Interpolate(10.0)])
def test_a_repeat_takes_one_anchor_alone(estimator: Token | Interpolate) -> None:
    stored = block([6, 8, 6])
    asked = Query((2,) * 6, stored.keys[14:20], 1e-3)
    proposal = estimator.propose(asked, stored, 2)
    assert proposal.columns.tolist() == [[14 + t] for t in range(6)]
    assert torch.equal(proposal.weights, torch.ones(6, 1))
    assert proposal.mass.tolist() == proposal.after.tolist() == [0, 0, 1]
    assert not proposal.distance.any()


@pytest.mark.parametrize("estimator", [Token(8, 0.05, 10.0), Interpolate(10.0)])
def test_one_token_that_equals_all_there_is(estimator: Token | Interpolate) -> None:
    ones = torch.ones(1, 6)
    stored = KeyBlock([Anchor(i, (i,), ones) for i in range(3)])
    proposal = estimator.propose(Query((9,), ones, 1e-3), stored, None)
    torch.testing.assert_close(proposal.weights, torch.full((1, 3), 1 / 3))
    assert torch.isfinite(proposal.distance).all()


# key vectors, and the tokens whose are nearest ------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(1, 30), st.integers(1, 9), st.integers(0, 99))
@example([1500, 700, 2301], 600, 8, 3)  # a large block, and many chunks
def test_nearest_is_exact(lengths: list[int], tokens: int, k: int, seed: int) -> None:
    stored, asked = anchors(lengths, 6, seed), query(tokens, seed + 1)
    found = KeyBlock(stored).nearest(asked, k)
    distances = torch.cdist(asked.keys.double(), torch.cat([a.keys for a in stored]).double()).square()
    wanted = distances.topk(min(k, sum(lengths)), dim=1, largest=False)
    torch.testing.assert_close(found.squared.double(), wanted.values, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(distances.gather(1, found.columns), wanted.values, atol=1e-4, rtol=1e-4)
    assert float(found.mean_squared) == pytest.approx(float(distances.mean()), rel=1e-4)


def test_aligned_compares_token_by_token() -> None:
    stored = anchors([3, 7, 9], 4)
    asked, kept = query(5, dim=4), KeyBlock(stored)
    long = kept.long_enough(5)
    assert long.tolist() == [1, 2]
    wanted = torch.stack([(a.keys[:5] - asked.keys).square().sum(1) for a in stored[1:]])
    torch.testing.assert_close(kept.aligned(asked, long), wanted)
    assert kept.owner.tolist() == [0] * 3 + [1] * 7 + [2] * 9


def test_ends_compare_as_many_last_tokens_as_both_have() -> None:
    stored = anchors([3, 7, 9], 4)
    for tokens in (1, 5, 20):
        asked, wanted = query(tokens, dim=4), []
        for anchor in stored:
            n = min(6, tokens, anchor.length)
            wanted.append((anchor.keys[-n:] - asked.keys[-n:]).square().sum(1).mean())
        torch.testing.assert_close(KeyBlock(stored).ends(asked, 6), torch.stack(wanted))


def test_projection_is_orthonormal_seeded_and_only_where_needed() -> None:
    base = random_kv(3, 0)
    wide = torch.cat([base.keys[2].flatten(1), base.values[2].flatten(1)], dim=1)
    assert torch.equal(KeyReader(2 * HEADS * DIM).read((1, 2, 3), base).keys, wide)
    first, second = (KeyReader(4).read((1, 2, 3), base).keys for _ in range(2))
    assert first.shape == (3, 4)
    assert torch.equal(first, second)
    basis = torch.zeros(1, 2 * HEADS * DIM, HEADS, DIM)
    basis[0].flatten(1)[: HEADS * DIM] = torch.eye(HEADS * DIM)  # unit vectors as keys, zeros as values: rows of P
    rows = KeyReader(4).read((), type(base)(basis, basis.flip(1))).keys
    torch.testing.assert_close(rows.T @ rows, torch.eye(4), atol=1e-5, rtol=0)


def test_the_layer_is_at_two_thirds_of_the_depth() -> None:
    base = random_kv(2, 0, layers=9)
    tokens, everything = (1, 2), 2 * HEADS * DIM
    assert torch.equal(KeyReader(everything).read(tokens, base).keys[:, : HEADS * DIM], base.keys[6].flatten(1))
    shallow = random_kv(2, 0, layers=1)
    assert len(KeyReader(4).read(tokens, shallow).keys) == 2


def test_rounding_is_no_difference_but_context_is() -> None:
    base = random_kv(6, 0, torch.bfloat16)
    query = KeyReader(64).read(tuple(range(6)), base)
    anchor = Anchor(0, query.tokens, query.keys)
    assert anchor.is_value(Query(query.tokens, query.keys * 1.01, query.tolerance))
    assert not anchor.is_value(Query(query.tokens, query.keys * 1.2, query.tolerance))
    assert not anchor.is_value(Query((0,) * 6, query.keys, query.tolerance))
