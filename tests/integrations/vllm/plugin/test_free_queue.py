"""The free queue against a naive twin that sorts all blocks, and its own integrity check."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kedge.errors import PlanError
from kedge.integrations.vllm.plugin.free_queue import StepFreeQueue
from kedge.policies.eviction import EvictionPolicy, kind_of, lru, steps_to_execution

BLOCKS = 10
AGENTS = "abcd"
POLICY = steps_to_execution(virtual_step=2.0)


@dataclass
class Kept:
    """A free block with KV, for the twin."""

    last_access: int
    step: float | None
    varying: bool


@dataclass
class Twin:
    """Sorts everything, every time. Blocks of one owner set go together, from the one that was added last; which block
    is in which set is looked up in the queue.
    """

    policy: EvictionPolicy
    loose: list[int]
    set_of: Callable[[int], Any]
    stamps: dict[Any, int] = field(default_factory=dict)
    """When blocks were last added to a set"""
    places: dict[int, int] = field(default_factory=dict)
    evicted: Counter[str] = field(default_factory=Counter)
    kept: dict[int, int] = field(default_factory=dict)
    owners: dict[int, set[str]] = field(default_factory=dict)
    varying: set[int] = field(default_factory=set)
    steps: dict[str, float] = field(default_factory=dict)
    clock: int = 0

    def view(self, block: int) -> Kept:
        steps, found = [self.steps[owner] for owner in self.owners.get(block, ())], self.set_of(block)
        used = self.kept[block] if found.stamp is None else self.stamps[found]
        return Kept(used, min(steps, default=None), block in self.varying)

    def key(self, block: int) -> tuple[float, ...]:
        return self.policy(self.view(block))

    def sort_key(self, block: int) -> tuple[float, ...]:
        newest_first = self.set_of(block).stamp is not None
        return *self.key(block), -self.kept[block] if newest_first else self.kept[block], self.places[block]

    def order(self) -> list[int]:
        return self.loose + sorted(self.kept, key=self.sort_key)

    def take(self, n: int) -> list[int]:
        taken = self.order()[:n]
        self.evicted.update(kind_of(self.view(block)) for block in taken if block in self.kept)
        for block in taken:
            self.drop(block)
        self.forget(taken)
        return taken

    def forget(self, blocks: list[int]) -> None:
        for block in blocks:
            self.owners.pop(block, None)
            self.varying.discard(block)

    def drop(self, block: int) -> None:
        if block in self.kept:
            del self.kept[block]
        else:
            self.loose.remove(block)

    def keep(self, blocks: list[int]) -> None:
        last = None
        for place, block in enumerate(blocks):
            found = self.set_of(block)
            self.clock += found is not last
            last = found
            self.stamps[found] = self.kept[block] = self.clock
            self.places[block] = place

    def forecast(self, owner: str, step: float | None) -> None:
        if step is None:
            self.steps.pop(owner, None)
            for owners in self.owners.values():
                owners.discard(owner)
        else:
            self.steps[owner] = step


class Machine(RuleBasedStateMachine):
    """vLLM's calls in any order: blocks are held or free, and only held ones change owners."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [KVCacheBlock(i) for i in range(BLOCKS)]
        self.queue = StepFreeQueue(self.blocks, BLOCKS, POLICY)
        self.twin = Twin(POLICY, list(range(BLOCKS)), lambda i: self.queue.set_of[i])
        self.held: list[int] = []
        for owner in AGENTS[:3]:
            self.forecast(owner, 1.0)

    @rule(n=st.integers(0, BLOCKS))
    def allocate(self, n: int) -> None:
        n = min(n, self.queue.num_free_blocks)
        taken = self.twin.take(n)
        found = [self.queue.popleft()] if n == 1 else self.queue.popleft_n(n)
        assert [block.block_id for block in found] == taken
        self.held += taken

    @precondition(lambda self: self.held)
    @rule(data=st.data(), cached=st.booleans())
    def free(self, data: st.DataObject, cached: bool) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.held), unique=True))
        blocks = [self.blocks[i] for i in chosen]
        self.held = [i for i in self.held if i not in chosen]
        if cached:
            self.queue.append_n(blocks)
            self.twin.keep(chosen)
        else:
            self.queue.prepend_n(blocks)
            self.twin.loose[:0] = chosen
            self.twin.forget(chosen)

    @precondition(lambda self: self.queue.num_free_blocks)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted({*self.twin.kept, *self.twin.loose})))
        self.queue.remove(self.blocks[block])
        self.twin.drop(block)
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), owner=st.sampled_from(AGENTS))
    def own(self, data: st.DataObject, owner: str) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.held), min_size=1, unique=True))
        if owner not in self.twin.steps:
            with pytest.raises(PlanError):
                self.queue.own(chosen, owner)
            return
        self.queue.own(chosen, owner)
        for block in chosen:
            self.twin.owners.setdefault(block, set()).add(owner)
            self.twin.varying.discard(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def follow(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.held), min_size=1, unique=True))
        self.queue.mark_suffix(chosen)
        self.twin.varying |= {block for block in chosen if block not in self.twin.owners}

    @precondition(lambda self: self.held)
    @rule(data=st.data(), owner=st.sampled_from(AGENTS))
    def own_history(self, data: st.DataObject, owner: str) -> None:
        """A prompt of which the owner has a prefix: it leaves behind all else."""
        if owner not in self.twin.steps:
            return
        chosen = data.draw(st.lists(st.sampled_from(self.held), min_size=1, unique=True))
        chosen.sort(key=lambda block: owner not in self.twin.owners.get(block, ()))
        self.queue.own_history(chosen, owner)
        for owners in self.twin.owners.values():
            owners.discard(owner)
        assert self.queue.members_of(owner) == len(chosen)
        for block in chosen:
            self.twin.owners.setdefault(block, set()).add(owner)
            self.twin.varying.discard(block)

    @rule(owner=st.sampled_from(AGENTS), step=st.sampled_from([0.0, 1.0, 2.0, 3.0, math.inf, None]))
    def forecast(self, owner: str, step: float | None) -> None:
        self.queue.owners.on_forecast({owner: None if step is None else (step, 1.0)})
        self.twin.forecast(owner, step)

    @rule(policy=st.sampled_from([POLICY, lru]))
    def change_policy(self, policy: EvictionPolicy) -> None:
        assert self.queue.set_policy(policy) is self.twin.policy
        self.twin.policy = policy

    @precondition(lambda self: self.queue.num_free_blocks < BLOCKS)
    @rule()
    def ask_too_much(self) -> None:
        with pytest.raises(PlanError):
            self.queue.popleft_n(self.queue.num_free_blocks + 1)
        if self.held:
            with pytest.raises(PlanError):
                self.queue.remove(self.blocks[self.held[0]])

    @rule()
    def empty_the_cache(self) -> None:
        """vLLM does so only while nobody holds a block."""
        self.queue.append_n([self.blocks[i] for i in self.held])
        self.twin.keep(self.held)
        self.held = []
        self.queue.forget_blocks()
        self.twin.loose = [block.block_id for block in self.queue.get_all_free_blocks()]
        self.twin.kept.clear()
        self.twin.forget(list(range(BLOCKS)))

    @invariant()
    def same_order(self) -> None:
        free = self.queue.get_all_free_blocks()
        assert [block.block_id for block in free] == self.twin.order()
        assert not free or [*self.queue.iter_blocks_after(free[0])] == free[1:]
        assert self.queue.evicted == self.twin.evicted

    @invariant()
    def sound(self) -> None:
        self.queue.check_integrity()

    @invariant()
    def same_room(self) -> None:
        def is_far(view: Any) -> bool:
            return POLICY(view)[:2] < (1.0, -2.0)

        far = sum(is_far(self.twin.view(block)) for block in self.twin.kept) + len(self.twin.loose)
        assert self.queue.room(far, is_far) == self.queue.room(far + 1, is_far) == far


TestSteps = Machine.TestCase
TestSteps.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_a_head_of_many_owners_is_one_set_that_grows_in_place_and_may_be_split() -> None:
    queue = StepFreeQueue([], 4, POLICY)
    sessions = [f"s{i}" for i in range(30)]
    queue.owners.on_forecast(dict.fromkeys([*sessions, "new"], (2.0, 1.0)))
    for session in sessions:
        queue.own([0, 1, 2], session)
    assert queue.set_of[0] is queue.set_of[1] and len(list(queue.sets())) == 3, "the head, and those without owners"
    queue.own([0], "new")
    assert queue.set_of[0].owners == {*sessions, "new"} and queue.set_of[1].owners == set(sessions)
    with pytest.raises(ValueError, match="No free blocks"):
        queue.popleft()
    queue.check_integrity()
