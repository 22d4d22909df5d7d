from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.cache import loads
from kedge.cache.node import TreeNode
from kedge.policies.prefetch import Candidate, is_within, may_replace
from tests.cache.helpers import NS, World
from tests.cache.test_hazards import on_host_only

CANDIDATES = st.builds(
    Candidate,
    st.builds(lambda: TreeNode(NS, None, b"", 0)),
    st.sampled_from([0.0, 1.0, 2.0, 3.0, math.inf]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(1, 5),
)


@given(st.lists(CANDIDATES, max_size=12))
def test_soonest_then_likeliest_then_smallest(candidates: list[Candidate]) -> None:
    naive = sorted(candidates, key=lambda one: one.size)
    naive.sort(key=lambda one: one.probability, reverse=True)
    naive.sort(key=lambda one: one.step)
    assert sorted(candidates, key=lambda one: one.order) == naive


def test_what_nobody_can_tell_is_never_within() -> None:
    assert [is_within(step, math.inf) for step in (None, math.inf, 5.0)] == [False, False, True]


def test_victims_are_suffixes_or_strictly_farther() -> None:
    node = TreeNode(NS, None, b"", 1)
    assert may_replace(node, 7, virtual_step=8) and not may_replace(node, 8, virtual_step=8)
    node.varying = True
    assert may_replace(node, 100, virtual_step=8)
    node.step = 3.0
    assert may_replace(node, 2, 8) and not may_replace(node, 3, 8) and not may_replace(node, 4, 8)


def test_what_is_needed_gives_way_only_to_what_is_likelier_needed_than_not() -> None:
    node = TreeNode(NS, None, b"", 1)
    node.step = 5.0
    assert may_replace(node, 1, 8, probability=0.6) and not may_replace(node, 1, 8, probability=0.5)
    node.step = None
    assert not may_replace(node, 1, 8, probability=0.5), "traffic without labels may come again"
    node.varying = True
    assert may_replace(node, 1, 8, probability=0.1)


def test_all_branches_are_loaded_and_nobody_outside_the_window() -> None:
    world = World(9, host_blocks=12, prefetch_window=1)
    on_host_only(world, a="AA", b="BB", c="CC", d="DD")
    world.forecast(a=1, b=1, c=2, d=math.inf)
    world.settle()
    assert world.on_device("AA", "BB", "CC", "DD") == ["AA", "BB"]
    assert world.cache.stats().transfers["prefetch"]["completed"] == 0, "not yet hit"
    assert world.serve("AA") == 2
    assert world.outcomes("prefetch") == {"completed": 1}
    assert world.cache.stats().prefetched_hit_tokens == 2


def test_no_more_than_the_jobs_that_are_allowed_and_likely_ones_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "PREFETCH_JOBS", 1)
    world = World(9, host_blocks=12)
    on_host_only(world, a="AA", b="BB")
    world.cache.on_forecast({"a": (1.0, 0.2), "b": (1.0, 0.8)})
    world.cache.pump()
    world.cache.pump()
    assert len(world.copier.submitted) == 1
    world.copier.end_all()
    world.cache.pump()
    assert world.on_device("AA", "BB") == ["BB"] and len(world.copier.submitted) == 1


def test_what_leaves_the_window_before_it_starts_is_cancelled() -> None:
    world = World(9, host_blocks=12, copy_jobs=1)
    on_host_only(world, a="AA", b="BB")
    world.forecast(a=0, b=1)
    world.cache.pump()
    world.forecast(a=9, b=9)
    assert world.outcomes("prefetch") == {"cancelled": 1}
    world.settle()
    assert world.on_device("AA", "BB") == ["AA"], "what had started ends"


def test_a_demanded_prefetch_is_promoted_and_counted_late() -> None:
    world = World(9, host_blocks=12, copy_jobs=1)
    on_host_only(world, a="AA", b="BB", c="CC")
    world.forecast(a=0, b=1, c=2)
    world.cache.pump()
    assert world.demand("CC") == "loading"
    loads = [copy for copy in world.copier.history if copy.direction == "load"]
    world.settle()
    assert len([copy for copy in world.copier.history if copy.direction == "load"]) == 3, "none is queued twice"
    assert world.outcomes("prefetch") == {"late": 1}
    assert len(loads) == 2, "the other prefetch under way does not hold it up"
    lease = world.admit("CC", request=world.new_request())
    assert lease.spans[0].source == "host"


def test_a_prefetch_that_a_recompute_overtook_is_wasted() -> None:
    world = World(6, host_blocks=12)
    on_host_only(world, a="AA")
    world.forecast(a=0)
    world.cache.pump()
    world.serve("AA")
    assert world.on_device("AA") == ["AA"]
    world.settle()
    assert world.outcomes("prefetch") == {"wasted": 1}


def test_the_ancestors_come_in_the_same_load() -> None:
    world = World(9, host_blocks=12)
    on_host_only(world, a="AA", ab="AABB")
    world.forecast(ab=1)
    world.cache.pump()
    assert [len(copy.sources) for copy in world.copier.submitted] == [4]
    world.settle()
    assert world.on_device("AABB") == ["AABB"]


def test_an_evicted_fixed_prompt_comes_back_while_its_agent_is_near() -> None:
    world = World(6, host_blocks=12)
    on_host_only(world, a="AA")
    world.forecast(a=1)
    world.settle()
    world.serve("123456")
    assert not world.on_device("AA")
    world.settle()
    assert world.on_device("AA") == ["AA"], "it replaced traffic without a label"


def test_a_label_alone_makes_a_prompt_on_the_host_come() -> None:
    """So a new run of a known agent can be expected before its first request."""
    world = World(6, host_blocks=12)
    on_host_only(world, old="AA")
    world.forecast(new=1)
    world.cache.pump()
    world.cache.on_label(NS, "new", b"AA")
    world.settle()
    assert world.on_device("AA") == ["AA"]
