from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.anchors.anchor import Anchor, AnchorId, KeyBlock, Query
from kedge.anchors.calibration import Calibration
from kedge.anchors.criteria import Length, Leverage, Spread
from kedge.anchors.estimators import Match, Token
from kedge.anchors.store import AnchorStore
from kedge.settings import AnchorSettings
from tests.anchors.helpers import SLOT, filled, generator, observe, sample

NONE = Calibration()


def match(keys: list[torch.Tensor], asked: torch.Tensor) -> Match:
    block = KeyBlock([Anchor(AnchorId(i), (i,) * len(k), k) for i, k in enumerate(keys)])
    query = Query((0,) * len(asked), asked, 1e-3)
    return Match(query, block, None, Token(1, 0.05, 10.0).propose(query, block, None))


def cloud(tokens: int, seed: int, dim: int = 5) -> torch.Tensor:
    return torch.randn(tokens, dim, generator=generator(seed)) + 3


@settings(max_examples=25, deadline=None)
@given(tokens=st.integers(3, 60), scale=st.floats(1e-2, 1e2), seed=st.integers(0, 10**6))
def test_leverage_is_that_of_the_textbook(tokens: int, scale: float, seed: int) -> None:
    keys, asked = scale * cloud(tokens, seed), scale * cloud(4, seed + 1)
    x, q = (torch.cat([part, torch.ones(len(part), 1)], dim=1).double() for part in (keys, asked))
    gram = x.T @ x
    gram += 1e-3 * gram.diagonal().mean() * torch.eye(6)
    inverse = torch.linalg.inv(gram)
    own = torch.stack([row @ inverse @ row for row in x]).mean()
    wanted = torch.stack([row @ inverse @ row for row in q]) / own
    torch.testing.assert_close(Spread.of(keys).leverage(asked).double(), wanted, rtol=1e-3, atol=1e-4)


def test_tokens_among_the_anchors_are_shareable_and_strangers_are_not() -> None:
    criterion, keys = Leverage(2, 2.0, 6.0), [cloud(40, 0), cloud(40, 1)]
    assert criterion.judge(match(keys, cloud(20, 2)), NONE).shareable
    far = criterion.judge(match(keys, cloud(20, 2) * torch.tensor([1, 1, 1, 1, -1])), NONE)
    assert not far.shareable
    assert "leverage is" in far.reason
    one_far = torch.cat([cloud(19, 3), 20 * cloud(1, 4)])
    assert criterion.judge(match(keys, one_far), NONE).weak.tolist() == [False] * 19 + [True]


def test_leverage_needs_anchors_and_nothing_else() -> None:
    criterion = Leverage(3, 2.0, 6.0)
    assert criterion.lacks(5, match([cloud(5, 0)] * 2, cloud(2, 1)).block, NONE) == "2 anchors of 3"
    assert criterion.lacks(5, match([cloud(5, 0)] * 3, cloud(2, 1)).block, NONE) == ""
    store = filled(range(5), criterion="leverage", max_leverage=1e9, weak_leverage=1e9)
    assert store.estimate(SLOT, sample(50)).shareable


def test_leverage_looks_again_when_the_anchors_have_changed() -> None:
    store = AnchorStore(AnchorSettings(criterion="leverage", min_anchors=1, max_leverage=1.0, weak_leverage=1e9))
    observe(store, sample(0, tokens=6))
    value = sample(40, tokens=80)
    alone = store.estimate(SLOT, value).reason
    observe(store, sample(40, tokens=81))
    assert alone
    assert store.estimate(SLOT, value).reason != alone


@pytest.mark.parametrize(
    ("lengths", "lack"), [([3, 4], "longer than every anchor"), ([5, 4], "only one anchor is as long")]
)
def test_length_asks_for_two_long_anchors(lengths: list[int], lack: str) -> None:
    asked = match([cloud(n, n) for n in lengths], cloud(5, 9))
    assert Length().lacks(5, asked.block, NONE) == lack
    assert Length().lacks(4, asked.block, NONE) == ("" if min(lengths) >= 4 else "only one anchor is as long")


def test_length_shares_what_entropy_would_not() -> None:
    settings = {"estimator": "interpolate", "gamma": 0.3, "temperature": 1e-3}
    assert "entropy" in filled(range(4), criterion="entropy", **settings).estimate(SLOT, sample(50)).reason
    estimate = filled(range(4), criterion="length", **settings).estimate(SLOT, sample(50))
    assert estimate.shareable
    assert not estimate.weak_positions()
