from __future__ import annotations

import math
from dataclasses import dataclass

from kedge.policies.eviction import EvictionPolicy, belady, distance, steps_to_execution


@dataclass(eq=False)
class Leaf:
    last_access: int
    size: int = 1
    namespace: tuple[str, str] = ("t", "m")
    step: float | None = None
    varying: bool = False

    def prefix(self) -> bytes:
        return b""


def order(policy: EvictionPolicy, *leaves: Leaf) -> list[int]:
    """Who goes when: the leaves' times of last use, in the order of eviction."""
    return [leaf.last_access for leaf in sorted(leaves, key=policy)]


def test_suffixes_first_then_whoever_runs_last_then_the_least_recently_used() -> None:
    far, near, nearer = Leaf(1, step=9), Leaf(2, step=2), Leaf(3, step=1)
    unknown, plain, suffix, older = Leaf(4, step=math.inf), Leaf(5), Leaf(9, varying=True), Leaf(0, step=2)
    everybody = [far, near, nearer, unknown, plain, suffix, older]
    assert order(steps_to_execution(virtual_step=4), *everybody) == [9, 4, 1, 5, 0, 2, 3]


def test_a_fixed_prompt_inside_a_suffix_is_a_fixed_prompt() -> None:
    inside, suffix = Leaf(1, step=9, varying=True), Leaf(2, varying=True)
    assert order(steps_to_execution(), inside, suffix) == [2, 1]
    assert (distance(inside), distance(suffix), distance(Leaf(3), 5.0)) == (9, math.inf, 5.0)


def test_belady_evicts_what_is_used_again_last() -> None:
    uses = {1: 30.0, 2: math.inf, 3: 10.0, 4: 20.0}
    policy = belady(lambda node: uses[node.last_access])
    assert order(policy, *map(Leaf, uses)) == [2, 1, 4, 3]
