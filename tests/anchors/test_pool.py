from dataclasses import replace

import pytest
import torch

from kedge.anchors.anchor import Anchor, AnchorId, PlaceholderSite, Query, SampleView
from kedge.anchors.pool import AnchorPool
from kedge.anchors.sites import Observation, SiteOffsets
from kedge.errors import PlanError
from tests.anchors.helpers import POOL, PREFIX, PREFIX_BASE, SLOT, in_context, random_kv


def add(pool: AnchorPool, number: int, site: PlaceholderSite = SLOT, hits: int = 0) -> AnchorId:
    base = random_kv(4, number)
    observed = Observation.measure(base, in_context(base, 1), PREFIX_BASE, PREFIX_BASE)
    keys = base.keys[1].flatten(1)
    known = pool.find(Query((number,) * 4, keys, 1e-3))
    anchor = known or Anchor(number, (number,) * 4, keys, hits)
    pool.add(site, pool.sites.get(site) or SiteOffsets(base, PREFIX), anchor, observed)
    pool.check_integrity()
    return anchor.id


def test_prunes_the_least_used_among_the_five_earliest() -> None:
    pool = AnchorPool(7, 8)
    for number, hits in enumerate((4, 2, 3, 2, 9, 0, 0)):
        add(pool, number, hits=hits)
    add(pool, 7)  # the window is 0-4: 1 and 3 have two hits, and 1 is older; 5 and 6 are not looked at
    assert list(pool.anchors) == [0, 2, 3, 4, 5, 6, 7]
    add(pool, 8)  # 0, 2, 3, 4, 5
    assert list(pool.anchors) == [0, 2, 3, 4, 6, 7, 8]


def test_slots_are_bounded_and_take_their_orphans_along() -> None:
    pool = AnchorPool(9, 2)
    first, second, third = (PlaceholderSite(name, 1) for name in "abc")
    add(pool, 0, first)
    add(pool, 1, first)
    add(pool, 1, second)
    add(pool, 2, third)
    assert list(pool.sites) == [second, third]
    assert list(pool.anchors) == [1, 2]


def test_nbytes_counts_tables_and_keys() -> None:
    pool = AnchorPool(2, 2)
    add(pool, 0)
    width = 3 * 2 * 2 * 8
    assert pool.pack() and not pool.pack()
    assert pool.nbytes == (4 + PREFIX) * width * 2 + 4 * 16 * 4
    pool.block((0,))
    assert pool.nbytes > (4 + PREFIX) * width * 2 + 4 * 16 * 4
    pool.drop(0)
    assert pool.pack() and not pool.pack()
    assert pool.nbytes == 0
    assert [table.live for table in pool.tables] == [0, 0]


# sites ----------------------------------------------------------------------------------------------------------------


def test_both_parts_or_none_and_of_as_many_tokens_as_their_base_has() -> None:
    base = random_kv(4, 1)
    with pytest.raises(PlanError, match="tokens=4"):
        Observation.measure(base, random_kv(5, 1), None, None)
    with pytest.raises(PlanError, match="tokens=3"):
        SampleView(POOL, (1, 2, 3), base, "key")
    site = SiteOffsets(base, PREFIX)
    observed = Observation.measure(base, in_context(base, 2), PREFIX_BASE, in_context(PREFIX_BASE, 3))
    site.put(0, observed)
    bad = replace(observed, prefix=torch.full_like(observed.prefix, float("nan")))
    with pytest.raises(Exception, match="does not fit"):
        site.put(1, bad)
    site.check_integrity()
    assert site.anchors == (0,)
    with pytest.raises(PlanError, match="before"):
        site.put(0, observed)
    with pytest.raises(PlanError, match="prefix_tokens"):
        site.put(1, replace(observed, prefix=observed.prefix[:2]))
    site.check_integrity()
    assert site.anchors == (0,)
