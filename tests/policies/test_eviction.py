import math
from dataclasses import dataclass

import pytest

from kedge.policies.eviction import EvictionPolicy, distance, kind_of, policy_of, steps_to_execution
from kedge.policies.prefetch import CostModel, UnitCost, is_awaited, is_within, may_replace
from kedge.settings import TierSettings


@dataclass(eq=False)
class Leaf:
    last_access: int
    step: float | None = None
    varying: bool = False


def order(policy: EvictionPolicy, *leaves: Leaf) -> list[int]:
    """Who goes when: the leaves' times of last use, in the order of eviction."""
    return [leaf.last_access for leaf in sorted(leaves, key=policy)]


def test_suffixes_first_then_whoever_runs_last_then_the_least_recently_used() -> None:
    """A fixed prompt inside a suffix is a fixed prompt."""
    far, near, nearer = Leaf(1, step=9, varying=True), Leaf(2, step=2), Leaf(3, step=1)
    unknown, plain, suffix, older = Leaf(4, step=math.inf), Leaf(5), Leaf(9, varying=True), Leaf(0, step=2)
    everybody = [far, near, nearer, unknown, plain, suffix, older]
    assert order(steps_to_execution(virtual_step=4), *everybody) == [9, 4, 1, 5, 0, 2, 3]
    assert (distance(far), distance(suffix), distance(plain, 5.0)) == (9, math.inf, 5.0)
    assert [kind_of(one) for one in (far, suffix, plain)] == ["labelled", "varying", "unlabelled"]
    assert [policy_of(TierSettings(policy=name))(suffix)[0] for name in ("lru", "steps")] == [9, 0]


# what may be evicted for what, and what a load has to beat ------------------------------------------------------------


def test_what_nobody_can_tell_is_never_within() -> None:
    assert [is_within(step, math.inf) for step in (None, math.inf, 5.0)] == [False, False, True]
    assert [is_awaited(step) for step in (None, 0.0, -0.5)] == [False, False, True]


def test_victims_are_suffixes_or_strictly_farther_and_give_way_to_what_is_likelier_needed_than_not() -> None:
    assert may_replace(Leaf(0), 7, virtual_step=8) and not may_replace(Leaf(0), 8, virtual_step=8)
    assert may_replace(Leaf(0, varying=True), 100, virtual_step=8)
    assert [may_replace(Leaf(0, step=3.0), step, 8) for step in (2, 3, 4)] == [True, False, False]
    needed, plain, suffix = Leaf(0, step=5.0), Leaf(0), Leaf(0, varying=True)
    assert may_replace(needed, 1, 8, probability=0.6) and not may_replace(needed, 1, 8, probability=0.5)
    assert not may_replace(plain, 1, 8, probability=0.5), "traffic without labels may come again"
    assert may_replace(suffix, 1, 8, probability=0.1)


def test_an_estimate_follows_what_is_observed_and_learns_nothing_from_nothing() -> None:
    estimate = UnitCost()
    for units, seconds in ((0, 1.0), (5, 0.0), (5, -1.0)):
        estimate.observe(units, seconds)
        assert estimate.seconds_per_unit is None
    estimate.observe(10, 1.0)
    assert estimate.seconds_per_unit == 0.1
    for _ in range(50):
        estimate.observe(10, 3.0)
    assert estimate.seconds_per_unit == pytest.approx(0.3, rel=1e-3)


def test_a_load_pays_while_it_beats_computing_with_all_that_is_ahead() -> None:
    cost = CostModel()
    assert cost.load_pays(1, 16)
    cost.load.observe(10, 1.0)
    assert cost.load_pays(1000, 16), "computing has never been measured"
    cost.compute.observe(100, 1.0)
    assert cost.load_pays(blocks=4, tokens=64)
    assert not cost.load_pays(blocks=4, tokens=64, blocks_ahead=3)
    assert not cost.load_pays(blocks=4, tokens=40), "as much is not less"
    for tokens in (0, 100):  # a pass without tokens says nothing
        cost.computed(tokens, 1.0, fade=0.5)
    assert cost.load.seconds_per_unit == 0.05
