"""`nearest`, `cosine` and `mean` against twins that loop over tokens and anchors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.anchors.anchor import Anchor, AnchorId, KeyBlock, Query
from kedge.anchors.estimators import Aligned, Interpolate, cosine, mean, nearest
from tests.anchors.helpers import generator

DIM = 6
Case = tuple[list[torch.Tensor], torch.Tensor]


def case(lengths: list[int], tokens: int, seed: int) -> Case:
    noise = generator(seed)
    return [torch.randn(n, DIM, generator=noise) for n in lengths], torch.randn(tokens, DIM, generator=noise)


def block(anchors: list[torch.Tensor]) -> KeyBlock:
    return KeyBlock([Anchor(AnchorId(i), (i,) * len(keys), keys) for i, keys in enumerate(anchors)])


def query(keys: torch.Tensor) -> Query:
    return Query((0,) * len(keys), keys, 1e-3)


def least(anchors: list[list[list[float]]], value: list[list[float]]) -> list[float]:
    distances = [math.dist([x for t in a[: len(value)] for x in t], [x for t in value for x in t]) for a in anchors]
    return [float(i == distances.index(min(distances))) for i in range(len(anchors))]


def equal(anchors: list[list[list[float]]], value: list[list[float]]) -> list[float]:  # noqa: ARG001
    return [1 / len(anchors)] * len(anchors)


def by_angle(anchors: list[list[list[float]]], value: list[list[float]]) -> list[float]:
    flat = [x for token in value for x in token]
    chords = []
    for anchor in anchors:
        other = [x for token in anchor[: len(value)] for x in token]
        dot = sum(a * b for a, b in zip(flat, other, strict=True))
        chords.append(math.sqrt(2 - 2 * dot / math.hypot(*flat) / math.hypot(*other)))
    powers = [math.exp(-10 * chord / (sum(chords) / len(chords))) for chord in chords]
    return [power / sum(powers) for power in powers]


TWINS = {"nearest": (nearest(), least), "mean": (mean(), equal), "cosine": (cosine(10.0), by_angle)}


@pytest.mark.parametrize("name", TWINS)
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), tokens=st.integers(1, 9), seed=st.integers(0, 10**6)
)
def test_weights_are_those_of_the_twin(name: str, lengths: list[int], tokens: int, seed: int) -> None:
    estimator, twin = TWINS[name]
    keys, value = case([*lengths, tokens], tokens, seed)
    proposal = estimator.propose(query(value), block(keys), None)
    long_enough = [i for i, anchor in enumerate(keys) if len(anchor) >= tokens]
    wanted = [0.0] * len(keys)
    for i, weight in zip(long_enough, twin([keys[i].tolist() for i in long_enough], value.tolist()), strict=True):
        wanted[i] = weight
    torch.testing.assert_close(proposal.mass, torch.tensor(wanted), atol=1e-5, rtol=1e-4)
    assert torch.equal(proposal.after, proposal.mass)
    starts = [sum(map(len, keys[:i])) for i in range(len(keys))]
    dense = torch.zeros(tokens, sum(map(len, keys))).scatter_add_(1, proposal.columns, proposal.weights)
    for token in range(tokens):
        columns = {starts[i] + token: weight for i, weight in enumerate(wanted) if weight}
        assert dense[token].nonzero().flatten().tolist() == sorted(columns)
        torch.testing.assert_close(dense[token].sum(), torch.tensor(1.0))


def test_cosine_does_not_see_length_and_interpolate_does() -> None:
    value = torch.randn(4, DIM, generator=generator(0))
    keys = block([3 * value, value + 0.5 * torch.randn(4, DIM, generator=generator(1))])
    assert float(cosine(10.0).propose(query(value), keys, None).mass[0]) > 0.9
    assert float(Interpolate(10.0).propose(query(value), keys, None).mass[0]) < 0.1


@pytest.mark.parametrize("estimator", [nearest(), mean(), cosine(10.0)])
def test_a_repeat_takes_one_anchor_alone(estimator: Aligned) -> None:
    keys, _ = case([6, 8, 6], 6, 0)
    proposal = estimator.propose(query(keys[2]), block(keys), 2)
    assert proposal.columns.tolist() == [[14 + t] for t in range(6)]
    assert proposal.mass.tolist() == proposal.after.tolist() == [0, 0, 1]


def test_equal_anchors_share_equally_whatever_the_rounding() -> None:
    keys = [torch.ones(3, DIM)] * 4
    mass = cosine(10.0).propose(query(torch.ones(3, DIM)), block(keys), None).mass
    assert torch.isfinite(mass).all()
    assert float(mass.sum()) == pytest.approx(1)
