"""vLLM's free blocks in the order of an eviction policy (KVFlow, section 3.1), in place of its own free queue.

Blocks without KV worth keeping go first, as in vLLM. The others are listed by the agents that own them; a heap over
these sets of owners says which list is next. A new step of an agent costs O(its owner sets), not O(its blocks); taking
a block out costs what it costs in vLLM, and evicting a run of blocks one look at the heap. Lists run through the two
links that vLLM's blocks have for its own free queue. Nothing here imports vLLM.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Protocol

from kedge.errors import PlanError
from kedge.policies.eviction import EvictionKey, StepPolicy, StepView, kind_of
from kedge.structures.heaps import LazyHeap, StepCounts
from kedge.structures.prefixes import leading_count

Owner = Hashable
"""Who needs a block again: an agent whose fixed prompt it holds, or a session whose history it holds."""
MAX_NAMED = 8
"""Owners of a set up to which blocks with exactly these owners are brought together in it. What more own is the head
that their prompts share, and is found through its blocks."""


class FreeBlock(Protocol):
    """vLLM's `KVCacheBlock`, as far as a free queue uses it. The links belong to the queue."""

    block_id: int
    prev_free_block: Any
    next_free_block: Any


class _ListEnd:
    """Sentinel before the first or after the last block of a list, so that every block has two neighbours."""

    __slots__ = ("block_id", "next_free_block", "prev_free_block")

    def __init__(self) -> None:
        self.block_id = -1
        self.prev_free_block: Any = None
        self.next_free_block: Any = None


class OwnerSet:
    """A set of owners with the free blocks that have exactly these owners: the unit that an eviction policy ranks."""

    __slots__ = (
        "_steps", "head", "key", "last_access", "members", "owners", "queued", "stamp", "step", "tail", "varying",
    )  # fmt: skip

    def __init__(self, owners: Iterable[Owner] = (), varying: bool = False, stamp: int | None = None) -> None:
        self.owners, self.varying = set(owners), varying
        self.stamp = stamp
        """When blocks were last added, for a set that is evicted as a whole, newest block first; None: each block has
        its own time"""
        self._steps: StepCounts | None = None
        """The steps of all owners, once there were several"""
        self.step: float | None = None
        self.last_access = 0
        self.members = 0
        """Blocks with these owners, free or not; not counted for the two sets without owners."""
        self.key: EvictionKey = ()
        self.queued = False
        """Whether the eviction order contains this set."""
        self.head, self.tail = _ListEnd(), _ListEnd()
        self.head.next_free_block, self.tail.prev_free_block = self.tail, self.head

    @property
    def is_empty(self) -> bool:
        """Whether no block is in it."""
        return self.head.next_free_block is self.tail

    def __iter__(self) -> Iterator[Any]:
        block = self.head.next_free_block
        while block is not self.tail:
            yield block
            block = block.next_free_block

    def count(self, most: int) -> int:
        """Return how many blocks are in it, counted up to `most`."""
        block, tail = self.head.next_free_block, self.tail
        for count in range(most):
            if block is tail:
                return count
            block = block.next_free_block
        return most

    def take(self, n: int, taken: list[Any]) -> None:
        """Move the first blocks to `taken`, until that has `n` blocks or this list is empty."""
        block, tail = self.head.next_free_block, self.tail
        for _ in range(n - len(taken)):
            if block is tail:
                break
            taken.append(block)
            after = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = after
        self.head.next_free_block = block
        block.prev_free_block = self.head

    def prepend(self, blocks: Sequence[FreeBlock]) -> None:
        """Insert `blocks` at the front, in their order."""
        last: Any = self.head
        after = last.next_free_block
        for block in blocks:
            block.prev_free_block = last
            last.next_free_block = block
            last = block
        last.next_free_block = after
        after.prev_free_block = last

    def change_step(self, old: float | None, new: float | None) -> bool:
        """Replace the step of one owner. Returns whether the least step of the set changes."""
        before = self.step
        if self._steps is None and old == before:
            self.step = new  # of its only owner
            return before != new
        if self._steps is None:
            self._steps = StepCounts()
            if before is not None:
                self._steps.add(before)
        if old is not None:
            self._steps.remove(old)
        if new is not None:
            self._steps.add(new)
        self.step = self._steps.least
        return before != self.step


class BlockOwners:
    """The owner set of every block and the step of every owner. A set exists while it has members."""

    def __init__(self, num_blocks: int, whole_sets: bool = False) -> None:
        """Begin without owners; with `whole_sets`, sets of owners are evicted as a whole."""
        self._num_blocks = num_blocks
        self._stamp = 0 if whole_sets else None
        self._steps: dict[Owner, float] = {}
        self.clear_owners()

    def clear_owners(self) -> None:
        """Make every block unowned. Steps stay known."""
        self.unowned, self.suffix = OwnerSet(), OwnerSet(varying=True)
        self.set_of = [self.unowned] * self._num_blocks
        """By block id"""
        self._named: dict[frozenset[Owner], OwnerSet] = {}
        """Sets by their owners, see `MAX_NAMED`; of two with the same owners this has one"""
        self._owned: set[OwnerSet] = set()
        """All sets with members that have or had owners"""
        self._by_owner: dict[Owner, set[OwnerSet]] = {}

    def sets(self) -> Iterator[OwnerSet]:
        """Yield all sets that a block may be in."""
        return itertools.chain((self.unowned, self.suffix), self._owned)

    def has_step(self, owner: Owner) -> bool:
        """Return whether the step of `owner` is known."""
        return owner in self._steps

    def step_of(self, owner: Owner) -> float:
        """Return the step of an owner that has one."""
        return self._steps[owner]

    def sets_of(self, owner: Owner) -> list[OwnerSet]:
        """Return the sets whose blocks `owner` owns."""
        return list(self._by_owner.get(owner, ()))

    def owned_prefix(self, block_ids: Sequence[int], owner: Owner) -> int:
        """Return how many leading blocks of a prompt `owner` owns, if it owns a prefix of it. O(log n), and O(1) where
        it owns all its blocks.
        """
        return leading_count(lambda at: self.owns(block_ids[at], owner), len(block_ids), guess=self.members_of(owner))

    def owns(self, block_id: int, owner: Owner) -> bool:
        """Return whether a block belongs to `owner`."""
        return owner in self.set_of[block_id].owners

    def members_of(self, owner: Owner) -> int:
        """Return how many blocks `owner` owns. O(its sets)."""
        return sum([owners.members for owners in self._by_owner.get(owner, ())])

    # blocks ---------------------------------------------------------------------------------------------------

    def own(self, block_ids: Iterable[int], owner: Owner) -> None:
        """Mark blocks that are in use as part of what `owner` needs again: a fixed prompt, or a history.

        Raises `PlanError` for an owner without a step.
        """
        if owner not in self._steps:
            raise PlanError("owner", owner, "has no step")
        for owners, members in self.by_set(block_ids).items():
            if owner in owners.owners:
                continue
            if owners in self._owned and len(members) == owners.members:
                self._widen(owners, owner)
            else:
                self._move(members, owners, self._find(frozenset(owners.owners | {owner})))

    def by_set(self, block_ids: Iterable[int]) -> dict[OwnerSet, list[int]]:
        """Return blocks by the set that they are in. O(n), with one look-up for each run of blocks of one set."""
        set_of, found = self.set_of, dict[OwnerSet, list[int]]()
        last: OwnerSet | None = None
        members: list[int] = []
        for block_id in block_ids:
            owners = set_of[block_id]
            if owners is not last:
                last, members = owners, found.setdefault(owners, [])
            members.append(block_id)
        return found

    def take_away(self, blocks: Sequence[FreeBlock], owner: Owner) -> None:
        """Remove `owner` from the owners of blocks that are in no list."""
        for owners, members in self.by_set(block.block_id for block in blocks).items():
            if owner in owners.owners:
                others = owners.owners - {owner}
                self._move(members, owners, self._find(frozenset(others)) if others else self.unowned)

    def mark_suffix(self, block_ids: Iterable[int]) -> None:
        """Mark blocks that are in use as following a fixed prompt; owned blocks stay owned."""
        for block_id in block_ids:
            if self.set_of[block_id] is self.unowned:
                self.set_of[block_id] = self.suffix

    def release(self, owners: OwnerSet, blocks: Sequence[FreeBlock]) -> None:
        """Make `blocks`, all of the set `owners`, unowned: their KV is lost."""
        for block in blocks:
            self.set_of[block.block_id] = self.unowned
        self._remove_members(owners, len(blocks))

    def _move(self, members: Sequence[int], before: OwnerSet, after: OwnerSet) -> None:
        for block_id in members:
            self.set_of[block_id] = after
        after.members += len(members)
        self._remove_members(before, len(members))

    def _remove_members(self, owners: OwnerSet, count: int) -> None:
        """Count members that have left. A set without members is dropped."""
        owners.members -= count
        if not owners.members and owners in self._owned:
            self._owned.discard(owners)
            self._unname(owners)
            for owner in owners.owners:
                self._by_owner[owner].discard(owners)

    # owners ---------------------------------------------------------------------------------------------------

    def update_steps(self, changes: Mapping[Any, tuple[float, float] | None]) -> list[OwnerSet]:
        """Take new steps (with probabilities, which are not used here); None removes an owner.

        Returns the sets whose least step has changed. O(owner sets of the changed owners).
        """
        changed: dict[OwnerSet, None] = {}
        for owner, next_run in changes.items():
            old = self._steps.get(owner)
            new = None if next_run is None else next_run[0]
            if old == new:
                continue
            for owners in self._by_owner.get(owner, ()):
                if owners.change_step(old, new):
                    changed[owners] = None
            if new is not None:
                self._steps[owner] = new
                continue
            del self._steps[owner]  # blocks without other owners compete like unowned ones from now on
            for owners in self._by_owner.pop(owner, set()):
                self._unname(owners)
                owners.owners.discard(owner)
                self._name(owners)
        return list(changed)

    def _find(self, names: frozenset[Owner]) -> OwnerSet:
        """Return a set with exactly these owners, new where none is named."""
        found = self._named.get(names)
        if found is None:
            found = OwnerSet(names, stamp=self._stamp)
            for owner in names:
                found.change_step(None, self._steps[owner])
                self._by_owner.setdefault(owner, set()).add(found)
            self._owned.add(found)
            self._name(found)
        return found

    def _widen(self, owners: OwnerSet, owner: Owner) -> None:
        """Add an owner to a set whose blocks are all in use, so that it is in no order."""
        self._unname(owners)
        owners.owners.add(owner)
        owners.change_step(None, self._steps[owner])
        self._by_owner.setdefault(owner, set()).add(owners)
        self._name(owners)

    def _name(self, owners: OwnerSet) -> None:
        if 0 < len(owners.owners) <= MAX_NAMED:
            self._named.setdefault(frozenset(owners.owners), owners)

    def _unname(self, owners: OwnerSet) -> None:
        if len(owners.owners) <= MAX_NAMED:
            names = frozenset(owners.owners)
            if self._named.get(names) is owners:
                del self._named[names]

    def check_integrity(self) -> None:
        """Raise `PlanError` unless the step and the members of every owned set agree with the books."""
        for owners in self._owned:
            steps = [self._steps[owner] for owner in owners.owners]
            if owners.step != min(steps, default=None) or owners.members != self.set_of.count(owners):
                raise PlanError("owners", owners.owners, f"step {owners.step} of {steps}, {owners.members} members")
        for names, owners in self._named.items():
            if owners not in self._owned or names != owners.owners:
                raise PlanError("owners", owners.owners, f"is no set with members that is named {names}")
        for owner, found in self._by_owner.items():
            if found != {owners for owners in self._owned if owner in owners.owners}:
                raise PlanError("owner", owner, "its sets are not those that name it")


class EvictionOrder:
    """A lazy heap of owner sets, each ranked by its oldest free block, and the set that is evicted from now.

    Blocks freed one after another with the same owners share a stamp. While the current set is ahead of all others,
    evicting a block costs no look at the heap.
    """

    def __init__(self, policy: StepPolicy, num_blocks: int) -> None:
        self._policy, self._num_blocks = policy, num_blocks
        self.clear()

    def clear(self) -> None:
        """Forget all sets and stamps."""
        self._stamps = [0] * self._num_blocks
        """When each block was freed, by block id"""
        self._clock = 0
        self._heap: LazyHeap[OwnerSet] = LazyHeap(attrgetter("key"))
        self._current: OwnerSet | None = None
        """The set whose blocks go next, as far as their stamps are at most `_bound`."""
        self._bound = math.inf

    def set_policy(self, policy: StepPolicy, sets: Iterable[OwnerSet]) -> StepPolicy:
        """Rank all `sets` by `policy` from now on. Returns the policy before."""
        before, self._policy, self._current = self._policy, policy, None
        for owners in sets:
            self._push(owners)
        return before

    def append(self, blocks: Sequence[FreeBlock], set_of: Sequence[OwnerSet]) -> None:
        """Add freed blocks to the lists of their owner sets (`set_of` by block id), in this order: to the end, or to
        the front of a set that is evicted as a whole.
        """
        stamps, clock = self._stamps, self._clock
        owners: OwnerSet | None = None
        last: Any = None
        after: Any = None
        for block in blocks:
            next_owners = set_of[block.block_id]
            if next_owners is not owners:
                clock += 1
                if owners is not None:
                    self._end_run(owners, last, after)
                owners = next_owners
                if owners.stamp is None:
                    last, after = owners.tail.prev_free_block, owners.tail
                else:
                    last, after, owners.stamp = owners.head, owners.head.next_free_block, clock
            stamps[block.block_id] = clock
            block.prev_free_block = last
            last.next_free_block = block
            last = block
        self._clock = clock
        if owners is not None:
            self._end_run(owners, last, after)

    def _end_run(self, owners: OwnerSet, last: Any, after: Any) -> None:
        """Close the list of `owners` between `last`, the last of several added blocks, and `after`."""
        last.next_free_block = after
        after.prev_free_block = last
        if not owners.queued:
            self.enter(owners)

    def take(self, n: int, taken: list[Any]) -> OwnerSet:
        """Move blocks of the next set to `taken`, until that has `n` or another set is next. Returns the set.

        Raises `PlanError` where no set has a free block.
        """
        owners = self._current or self._choose()
        start = len(taken)
        owners.take(n if math.isinf(self._bound) else start + self._within_bound(owners, n - start), taken)
        if owners.is_empty:
            self._current, owners.queued = None, False
        elif len(taken) == start or self._stamp(owners, owners.head.next_free_block) > self._bound:
            self.enter(owners)
        return owners

    def _within_bound(self, owners: OwnerSet, most: int) -> int:
        """Count the leading blocks of `owners` that are as old as the bound, up to `most`."""
        if owners.stamp is not None:
            return most if owners.stamp <= self._bound else 0
        stamps, bound = self._stamps, self._bound
        count = 0
        for block in owners:
            if count >= most or stamps[block.block_id] > bound:
                break
            count += 1
        return count

    def _choose(self) -> OwnerSet:
        """Make the set whose oldest block is next the current one, and set the bound up to which it stays that."""
        chosen = self._pop()
        if chosen is None:
            raise PlanError("free blocks", 0, "no owner set has any")
        self._bound = math.inf
        if rival := self._pop():
            if rival.key[:-1] == chosen.key[:-1]:
                self._bound = rival.last_access
            self._heap.push(rival)
        self._current = chosen
        return chosen

    def _pop(self) -> OwnerSet | None:
        """Return the set with the least key. A set whose oldest block has left since it was pushed is ranked again."""
        while owners := self._heap.pop():
            if owners.is_empty:
                owners.queued = False
                continue
            before, owners.key = owners.key, self._key(owners)
            if owners.key == before:
                return owners
            self._heap.push(owners)
        return None

    def enter(self, owners: OwnerSet) -> None:
        """Rank a set under its present key. The current set goes back to the heap, as it may not be next any more."""
        if self._current is not None and self._current is not owners:
            self._push(self._current)
        self._current = None
        self._push(owners)

    def on_steps(self, changed: Iterable[OwnerSet]) -> None:
        """Rank sets anew whose steps have changed. One that is needed sooner now stays where it is in the heap: it is
        ranked anew when it surfaces.
        """
        for owners in changed:
            if owners.queued and (owners is self._current or self._key(owners) < owners.key):
                self.enter(owners)

    def _push(self, owners: OwnerSet) -> None:
        owners.queued = not owners.is_empty
        if owners.queued:
            owners.key = self._key(owners)
            self._heap.push(owners)

    def _key(self, owners: OwnerSet) -> EvictionKey:
        """Return the rank of a set with free blocks, which is that of its oldest one."""
        return self._key_at(owners, owners.head.next_free_block)

    def _key_at(self, owners: OwnerSet, block: FreeBlock) -> EvictionKey:
        owners.last_access = self._stamp(owners, block)
        return self._policy(owners)

    def _stamp(self, owners: OwnerSet, block: FreeBlock) -> int:
        return self._stamps[block.block_id] if owners.stamp is None else owners.stamp

    def sort(self, sets: Iterable[OwnerSet]) -> list[Any]:
        """Return the free blocks of `sets` in the order of their eviction. O(n log n) in the number of blocks."""
        ranked = [(self._key_at(owners, block), block) for owners in sets for block in owners]
        ranked.sort(key=lambda pair: pair[0])
        return [block for _, block in ranked]


class StepFreeQueue(BlockOwners):
    """A drop-in for `vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue`. Without owners it has the same order.

    The owners of a block are set while a request holds it, and forgotten when its KV is evicted.
    """

    def __init__(
        self, blocks: Sequence[FreeBlock], num_blocks: int, policy: StepPolicy, whole_sets: bool = False
    ) -> None:
        """`blocks` are free, first to be used first; all block ids are below `num_blocks`.

        With `whole_sets`, blocks with the same owners are evicted one after the other, from the one that was added
        last: for a pool to which a prompt's blocks are added as it grows, without a use of those before.
        """
        self.evicted: Counter[str] = Counter()
        """Blocks with KV that were handed out, by step: "varying", "unlabelled", "inf" (unknown), or the number."""
        self.on_evicted: Callable[[Collection[Owner]], None] = lambda _: None
        """Called with the owners of evicted blocks, unless these are more than `MAX_NAMED`: before the head that many
        prompts share, their ends are evicted"""
        self.num_free_blocks = 0
        self.groups: Any = None
        """The KV cache groups whose blocks are in it: set and read by `block_pools.py` alone"""
        self._empty = OwnerSet()
        """Free blocks without KV worth keeping"""
        super().__init__(num_blocks, whole_sets)
        self._order = EvictionOrder(policy, num_blocks)
        self.prepend_n(blocks)

    # called by vLLM -------------------------------------------------------------------------------------------

    def popleft(self) -> Any:
        """Take the first free block. Raises `ValueError` where there is none, as vLLM's queue does."""
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        """Take the first `n` free blocks. Raises `PlanError` where there are fewer."""
        if n > self.num_free_blocks:
            raise PlanError("n", n, f"only {self.num_free_blocks} blocks are free")
        self.num_free_blocks -= n
        taken: list[Any] = []
        self._empty.take(n, taken)
        while len(taken) < n:
            self._evict(n, taken)
        return taken

    def _evict(self, n: int, taken: list[Any]) -> None:
        """Take blocks of the set that is next, until there are `n` or another set is next."""
        start = len(taken)
        owners = self._order.take(n, taken)
        self.evicted[kind_of(owners)] += len(taken) - start
        if owners is not self.unowned:
            self.release(owners, taken[start:])
            if len(owners.owners) <= MAX_NAMED:
                self.on_evicted(owners.owners)

    def remove(self, block: FreeBlock) -> None:
        """Take a block out of its list. Raises `PlanError` for a block that is not free."""
        self.remove_n((block,))

    def remove_n(self, blocks: Sequence[FreeBlock]) -> None:
        """Take different blocks out of their lists. Raises `PlanError` for a block that is not free."""
        for block in blocks:
            before, after = block.prev_free_block, block.next_free_block
            if before is None or after is None:
                raise PlanError("block", block.block_id, "is not free")
            before.next_free_block = after
            after.prev_free_block = before
            block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= len(blocks)

    def append(self, block: FreeBlock) -> None:
        """Add a free block whose KV is worth keeping."""
        self.append_n([block])

    def append_n(self, blocks: Sequence[FreeBlock]) -> None:
        """Add free blocks whose KV is worth keeping; of those with the same owners the first is evicted first."""
        self._order.append(blocks, self.set_of)
        self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: Sequence[FreeBlock]) -> None:
        """Add free blocks without KV worth keeping; the first of them is used before all others."""
        set_of, unowned = self.set_of, self.unowned
        for block in blocks:
            if set_of[block.block_id] is not unowned:
                self.release(set_of[block.block_id], [block])
        self._empty.prepend(blocks)
        self.num_free_blocks += len(blocks)

    def get_all_free_blocks(self) -> list[Any]:
        """Return all free blocks in the order in which they are used. O(n log n) in their number."""
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: FreeBlock | None) -> Iterator[Any]:
        """Yield the free blocks that are used after `cursor` (None: all), in that order."""
        order = [*self._empty, *self._order.sort(self.sets())]
        start = 0 if cursor is None else order.index(cursor) + 1
        yield from order[start:]

    # owners ---------------------------------------------------------------------------------------------------

    def own_history(self, block_ids: Sequence[int], owner: Owner) -> list[Any]:
        """Make `owner` own these blocks, all of a prompt that is in use, and no free block.

        Returns the free blocks that it had owned: it has left them behind. O(blocks that change their owners + log n)
        for a prompt that continues the one before; else O(n). Raises `PlanError` for an owner without a step.
        """
        left = [block for owners in self.sets_of(owner) for block in owners]
        if left:
            self.leave(left, owner)
        known = self.owned_prefix(block_ids, owner)
        if self.members_of(owner) < known:
            known = 0  # some of the blocks before are not its own
        self.own(block_ids[known:], owner)
        return left

    def leave(self, blocks: Sequence[FreeBlock], owner: Owner) -> None:
        """Remove `owner` from the owners of free blocks. O(blocks)."""
        self.remove_n(blocks)
        self.take_away(blocks, owner)
        self.append_n(blocks)

    def on_forecast(self, changes: Mapping[Any, tuple[float, float] | None]) -> None:
        """Take new steps (with probabilities, which are not used here); None removes an owner.

        O(owner sets of the changed owners).
        """
        self._order.on_steps(self.update_steps(changes))

    def forget_blocks(self) -> None:
        """Drop the KV and the owners of all blocks: the prefix cache was emptied. Steps stay known."""
        free = [*self._empty, *(block for owners in self.sets() for block in owners)]
        self.num_free_blocks = 0
        self._empty = OwnerSet()
        self.clear_owners()
        self._order.clear()
        self.prepend_n(free)

    def set_policy(self, policy: StepPolicy) -> StepPolicy:
        """Evict by `policy` from now on. Returns the policy before. O(owner sets)."""
        return self._order.set_policy(policy, self.sets())

    def room(self, blocks: int, may_evict: Callable[[StepView], bool]) -> int:
        """Return how many free blocks, up to `blocks`, have no KV worth keeping, or are in sets that `may_evict` takes.

        O(blocks + owner sets).
        """
        found = self._empty.count(blocks)
        for owners in self.sets():
            if found == blocks:
                break
            if not owners.is_empty and may_evict(owners):
                found += owners.count(blocks - found)
        return found

    def victims(self, n: int, may_evict: Callable[[OwnerSet], bool], is_own: Callable[[int], bool]) -> list[Any]:
        """Return up to `n` free blocks with KV whose ids `is_own` accepts, of sets that `may_evict` takes, in the order
        of their eviction. O(owner sets + m log m) with m free blocks of sets with such blocks.

        All blocks of a set with owners are alike to `is_own`.
        """
        shared = (self.unowned, self.suffix)
        sets = [
            owners
            for owners in self.sets()
            if not owners.is_empty
            and (owners in shared or is_own(owners.head.next_free_block.block_id))
            and may_evict(owners)
        ]
        return [block for block in self._order.sort(sets) if is_own(block.block_id)][:n]

    def check_integrity(self) -> None:
        """Raise `PlanError` unless links, counts and steps agree and every set with free blocks is in the order."""
        sets = list(self.sets())
        blocks = [block for owners in (self._empty, *sets) for block in owners]
        if len({block.block_id for block in blocks}) != len(blocks) or len(blocks) != self.num_free_blocks:
            raise PlanError("num_free_blocks", self.num_free_blocks, f"{len(blocks)} are in lists")
        for owners in sets:
            if not owners.is_empty and not owners.queued:
                raise PlanError("owners", owners.owners, "has free blocks and is not in the eviction order")
        super().check_integrity()
