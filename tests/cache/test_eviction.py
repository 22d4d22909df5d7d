from __future__ import annotations

from dataclasses import dataclass

import pytest

from kedge.cache.eviction import EvictionQueue, lru
from kedge.errors import PlanError


@dataclass(eq=False)
class Leaf:
    last_access: int
    evictable: bool = True
    ticket: int = 0
    size: int = 1
    namespace: tuple[str, str] = ("t", "m")


def test_least_recently_used_goes_first() -> None:
    queue: EvictionQueue[Leaf] = EvictionQueue(lru)
    leaves = [Leaf(5), Leaf(2), Leaf(9)]
    for leaf in leaves:
        queue.push(leaf)
    assert [queue.pop().last_access for _ in leaves] == [2, 5, 9]


def test_only_the_newest_entry_of_a_leaf_counts() -> None:
    queue: EvictionQueue[Leaf] = EvictionQueue(lru)
    old, other = Leaf(1), Leaf(2)
    queue.push(old)
    queue.push(other)
    old.last_access = 3
    queue.push(old)
    assert queue.covers([old, other])
    assert [queue.pop(), queue.pop()] == [other, old]


def test_what_is_not_evictable_never_surfaces() -> None:
    queue: EvictionQueue[Leaf] = EvictionQueue(lru)
    leaf = Leaf(1)
    queue.push(leaf)
    leaf.evictable = False
    assert queue.covers([])
    with pytest.raises(PlanError, match="eviction queue"):
        queue.pop()


def test_outdated_entries_do_not_pile_up() -> None:
    queue: EvictionQueue[Leaf] = EvictionQueue(lru)
    leaves = [Leaf(n) for n in range(10)]
    for n in range(1000):
        leaves[n % 10].last_access = n
        queue.push(leaves[n % 10])
    assert len(queue._heap) <= 64
    assert [queue.pop().last_access for _ in leaves] == list(range(990, 1000))
