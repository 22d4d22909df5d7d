from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kedge.anchors.anchor import AnchorId
from kedge.anchors.sites import Observation, SiteOffsets
from kedge.errors import PlanError
from tests.anchors.helpers import PREFIX, PREFIX_BASE, in_context, random_kv


def observation(tokens: int = 4) -> Observation:
    base = random_kv(tokens, 1)
    return Observation.measure(base, in_context(base, 2), PREFIX_BASE, in_context(PREFIX_BASE, 3))


def test_base_and_real_must_be_of_the_same_tokens() -> None:
    with pytest.raises(PlanError, match="tokens=4"):
        Observation.measure(random_kv(4, 1), random_kv(5, 1), None, None)


def test_a_value_at_the_end_of_a_prompt_has_no_prefix_after_it() -> None:
    base = random_kv(4, 1)
    assert Observation.measure(base, in_context(base, 2), None, None).prefix.shape[0] == 0


def test_both_parts_or_none() -> None:
    site = SiteOffsets(random_kv(4, 1), PREFIX)
    observed = observation()
    site.put(AnchorId(0), observed)
    bad = replace(observed, prefix=torch.full_like(observed.prefix, float("nan")))
    with pytest.raises(Exception, match="does not fit"):
        site.put(AnchorId(1), bad)
    site.check_integrity()
    assert site.holders == [0]
    with pytest.raises(PlanError, match="before"):
        site.put(AnchorId(0), observed)
    with pytest.raises(PlanError, match="prefix_tokens"):
        site.put(AnchorId(1), replace(observed, prefix=observed.prefix[:2]))
    site.check_integrity()
    assert site.holders == [0]
