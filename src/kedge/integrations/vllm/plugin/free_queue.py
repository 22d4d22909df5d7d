"""vLLM's free blocks in the order of an eviction policy (KVFlow, section 3.1), in place of its own free queue.

Blocks without KV worth keeping go first, as in vLLM. The others are listed by the agents that own them; a heap over
these sets of owners says which list is next. A new step of an agent costs O(its owner sets), not O(its blocks), and
blocks that were freed together are evicted by one look at the heap. Nothing here imports vLLM.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kedge.cache.owners import Owner, Owners, Ranked
from kedge.errors import PlanError
from kedge.policies.eviction import EvictionKey, EvictionPolicy, StepView, kind_of
from kedge.structures.heaps import LazyHeap
from kedge.structures.prefixes import leading_count

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class OwnerSet(Ranked):
    """A set of owners with the free blocks that have exactly these owners: the unit that an eviction policy ranks."""

    __slots__ = ("free", "members", "owners", "stamp")

    def __init__(self, varying: bool = False, stamp: int | None = None) -> None:
        super().__init__()
        self.owners, self.varying = set[Owner](), varying
        self.stamp = stamp
        """When blocks were last added, for a set with owners; None: each block has its own time"""
        self.members = 0
        """Blocks with these owners, free or not; not counted for the two sets without owners."""
        self.free: OrderedDict[int, Any] = OrderedDict()
        """Free blocks by id, as they were added"""

    @property
    def order(self) -> Iterable[Any]:
        """Its free blocks in the order of their eviction."""
        return self.free.values() if self.stamp is None else reversed(self.free.values())


class StepFreeQueue:
    """A drop-in for `vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue`. Without owners it has the same order.

    It has the owner set of every block. A set exists while it has members. The owners of a block are set while a
    request holds it, and forgotten when its KV is evicted.

    Blocks with the same owners are evicted one after the other, from the one that was added last: a prompt's blocks may
    be added as it grows, without a use of those before. Blocks without owners are ranked by the oldest free one; those
    that are freed one after another share a stamp.
    """

    def __init__(
        self, blocks: Sequence[KVCacheBlock], num_blocks: int, policy: EvictionPolicy, owners: Owners | None = None
    ) -> None:
        """`blocks` are free, first to be used first; all block ids are below `num_blocks`. Several queues may have the
        same `owners`.
        """
        self.owners = owners or Owners()
        self.owners.followers.append(self._follow)
        self.evicted: Counter[str] = Counter()
        """Blocks with KV that were handed out, by `kind_of`"""
        self.groups: Any = None
        """The KV cache groups whose blocks are in it: set and read by `block_pools.py` alone"""
        self._num_blocks, self._policy, self._clock = num_blocks, policy, 0
        self._begin(blocks)

    def _begin(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Begin with free blocks that have neither KV worth keeping nor owners."""
        self.num_free_blocks = 0
        self._empty: dict[int, Any] = {}
        """Free blocks without KV worth keeping by id, the one that is used next at the end"""
        self.unowned, self.suffix = OwnerSet(), OwnerSet(varying=True)
        self.set_of = [self.unowned] * self._num_blocks
        """By block id"""
        self._owned: set[OwnerSet] = set()
        """All sets with members that have or had owners"""
        self._by_owner: dict[Owner, set[OwnerSet]] = {}
        self._stamps = [0] * self._num_blocks
        """When each block was freed, by block id"""
        self._heap: LazyHeap[OwnerSet] = LazyHeap(self._key, lambda owners: bool(owners.free))
        """All sets with free blocks"""
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
        taken = [self._empty.popitem()[1] for _ in range(min(n, len(self._empty)))]
        while len(taken) < n:
            taken += self._evict(n - len(taken))
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out of its list. Raises `PlanError` for a block that is not free."""
        at = block.block_id
        if self.set_of[at].free.pop(at, None) is None and self._empty.pop(at, None) is None:
            raise PlanError("block", at, "is not free")
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Add a free block whose KV is worth keeping."""
        self.append_n([block])

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add free blocks whose KV is worth keeping; of those with the same owners the first is evicted first."""
        set_of, stamps = self.set_of, self._stamps
        for owners, run in itertools.groupby(blocks, lambda block: set_of[block.block_id]):
            self._clock += 1
            added, is_ranked = [(block.block_id, block) for block in run], bool(owners.free)
            if owners.stamp is None:
                for at, _ in added:
                    stamps[at] = self._clock
            else:
                owners.stamp = self._clock
                added.reverse()
            owners.free.update(added)
            if not is_ranked:
                self._heap.push(owners)
        self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add free blocks without KV worth keeping; the first of them is used before all others."""
        for block in blocks:
            if (owners := self.set_of[block.block_id]) is not self.unowned:
                self.release(owners, [block])
        self._empty.update((block.block_id, block) for block in reversed(blocks))
        self.num_free_blocks += len(blocks)

    def get_all_free_blocks(self) -> list[Any]:
        """Return all free blocks in the order in which they are used. O(n log n) in their number."""
        return [*reversed(self._empty.values()), *self._sorted(self.sets())]

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[Any]:
        """Yield the free blocks that are used after `cursor` (None: all), in that order."""
        order = self.get_all_free_blocks()
        yield from order[0 if cursor is None else order.index(cursor) + 1 :]

    # the order of eviction ------------------------------------------------------------------------------------

    def _evict(self, most: int) -> list[Any]:
        """Take up to `most` blocks of the set that goes first: those that were freed with its oldest."""
        owners = self._heap.peek()
        assert owners is not None
        free, is_whole, count = owners.free, owners.stamp is not None, min(most, len(owners.free))
        if not is_whole and count > 1:
            stamps, oldest = self._stamps, self._oldest(owners)
            alike = itertools.takewhile(lambda at: stamps[at] == oldest, itertools.islice(free, count))
            count = sum(1 for _ in alike)
        taken = [free.popitem(is_whole)[1] for _ in range(count)]
        self.evicted[kind_of(owners)] += count
        if owners is not self.unowned:
            self.release(owners, taken)
        return taken

    def _oldest(self, owners: OwnerSet) -> int:
        """Return the stamp of a set with free blocks, which is that of its oldest one."""
        return self._stamps[next(iter(owners.free))] if owners.stamp is None else owners.stamp

    def _key(self, owners: OwnerSet, stamp: int | None = None) -> EvictionKey:
        """Return the key of a set with free blocks, or of its blocks that were freed at `stamp`."""
        owners.last_access = self._oldest(owners) if stamp is None else stamp
        return self._policy(owners)

    def _sorted(self, sets: Iterable[OwnerSet]) -> list[Any]:
        """Return the free blocks of `sets` in the order of their eviction. O(n log n) in the number of blocks."""
        ranked = [
            (self._key(owners, self._stamps[block.block_id] if owners.stamp is None else owners.stamp), block)
            for owners in sets
            for block in owners.order
        ]
        ranked.sort(key=lambda pair: pair[0])
        return [block for _, block in ranked]

    def set_policy(self, policy: EvictionPolicy) -> EvictionPolicy:
        """Evict by `policy` from now on. Returns the policy before. O(owner sets)."""
        before, self._policy = self._policy, policy
        for owners in self.sets():
            if owners.free:
                self._heap.push(owners)
        return before

    # owners ---------------------------------------------------------------------------------------------------

    def sets(self) -> Iterator[OwnerSet]:
        """Yield all sets that a block may be in."""
        return itertools.chain((self.unowned, self.suffix), self._owned)

    def owns(self, block_id: int, owner: Owner) -> bool:
        """Return whether a block belongs to `owner`."""
        return owner in self.set_of[block_id].owners

    def members_of(self, owner: Owner) -> int:
        """Return how many blocks `owner` owns. O(its sets)."""
        return sum([owners.members for owners in self._by_owner.get(owner, ())])

    def _follow(self, owner: Owner, old: float | None, new: float | None) -> None:
        """Take the new step of an owner: O(its sets). None: it owns nothing any more."""
        for owners in self._by_owner.pop(owner, ()) if new is None else self._by_owner.get(owner, ()):
            if new is None:
                owners.owners.discard(owner)
            if owners.change_step(old, new) and owners.free:
                self._heap.push(owners)

    def own(self, block_ids: Iterable[int], owner: Owner) -> None:
        """Mark blocks that are in use as part of what `owner` needs again: a fixed prompt, or a history.

        Raises `PlanError` for an owner without a step.
        """
        if self.owners.step(owner) is None:
            raise PlanError("owner", owner, "has no step")
        for owners, members in self.by_set(block_ids).items():
            if owner in owners.owners:
                continue
            if owners in self._owned and len(members) == owners.members:
                self._widen(owners, owner)  # all its blocks are in use, so that it is in no order
            else:
                after = self._joined(owners, owner)
                for block_id in members:
                    self.set_of[block_id] = after
                after.members += len(members)
                self._remove_members(owners, len(members))

    def by_set(self, block_ids: Iterable[int]) -> dict[OwnerSet, list[int]]:
        """Return blocks by the set that they are in. O(n), with one look-up for each run of blocks of one set."""
        found = dict[OwnerSet, list[int]]()
        for owners, run in itertools.groupby(block_ids, self.set_of.__getitem__):
            found.setdefault(owners, []).extend(run)
        return found

    def mark_suffix(self, block_ids: Iterable[int]) -> None:
        """Mark blocks that are in use as following a fixed prompt; owned blocks stay owned."""
        for block_id in block_ids:
            if self.set_of[block_id] is self.unowned:
                self.set_of[block_id] = self.suffix

    def release(self, owners: OwnerSet, blocks: Sequence[KVCacheBlock]) -> None:
        """Make `blocks`, all of the set `owners`, unowned: their KV is lost."""
        for block in blocks:
            self.set_of[block.block_id] = self.unowned
        self._remove_members(owners, len(blocks))

    def _remove_members(self, owners: OwnerSet, count: int) -> None:
        """Count members that have left. A set without members is dropped."""
        owners.members -= count
        if not owners.members and owners in self._owned:
            self._owned.discard(owners)
            for owner in owners.owners:
                self._by_owner[owner].discard(owners)

    def _joined(self, owners: OwnerSet, owner: Owner) -> OwnerSet:
        """Return a set with the owners of another and one more, new where that one has none such."""
        wanted = owners.owners | {owner}
        found = next((one for one in self._by_owner.get(owner, ()) if one.owners == wanted), None)
        if found is None:
            found = OwnerSet(stamp=0)
            self._owned.add(found)
            for one in wanted:
                self._widen(found, one)
        return found

    def _widen(self, owners: OwnerSet, owner: Owner) -> None:
        owners.owners.add(owner)
        owners.change_step(None, self.owners.step(owner))
        self._by_owner.setdefault(owner, set()).add(owners)

    def own_history(self, block_ids: Sequence[int], owner: Owner) -> None:
        """Make `owner` own these blocks, all of a prompt that is in use, and no others: those it has left behind.

        O(blocks that change their owners + log n) for a prompt that continues the one before; else O(n). Raises
        `PlanError` for an owner without a step.
        """
        owned = self.members_of(owner)
        known = leading_count(lambda at: self.owns(block_ids[at], owner), len(block_ids), guess=owned)
        if known != owned:
            self.leave(owner)
            known = 0
        self.own(block_ids[known:], owner)

    def leave(self, owner: Owner) -> None:
        """Let an owner, whose step stays known, own nothing: blocks without other owners compete like unowned ones from
        now on. O(its sets).
        """
        self._follow(owner, self.owners.step(owner), None)

    def forget_blocks(self) -> None:
        """Drop the KV and the owners of all blocks: the prefix cache was emptied."""
        self._begin([*reversed(self._empty.values()), *(block for owners in self.sets() for block in owners.order)])

    def room(self, blocks: int, may_evict: Callable[[StepView], bool]) -> int:
        """Return how many free blocks, up to `blocks`, have no KV worth keeping, or are in sets that `may_evict` takes.

        O(owner sets).
        """
        found = len(self._empty)
        for owners in self.sets():
            if found >= blocks:
                break
            if owners.free and may_evict(owners):
                found += len(owners.free)
        return min(found, blocks)

    def victims(self, n: int, may_evict: Callable[[OwnerSet], bool], is_own: Callable[[int], bool]) -> list[Any]:
        """Return up to `n` free blocks with KV whose ids `is_own` accepts, of sets that `may_evict` takes, in the order
        of their eviction. O(owner sets + m log m) with m free blocks of sets with such blocks.

        All blocks of a set with owners are alike to `is_own`.
        """
        mixed = (self.unowned, self.suffix)
        found = [one for one in self.sets() if one.free and (one in mixed or is_own(next(iter(one.free))))]
        return [block for block in self._sorted(filter(may_evict, found)) if is_own(block.block_id)][:n]

    def check_integrity(self) -> None:
        """Raise `PlanError` unless lists, counts and steps agree and every set with free blocks is in the order."""
        sets = list(self.sets())
        listed = [at for free in (self._empty, *(owners.free for owners in sets)) for at in free]
        if len(set(listed)) != len(listed) or len(listed) != self.num_free_blocks:
            raise PlanError("num_free_blocks", self.num_free_blocks, f"{len(listed)} are in lists")
        for owners in sets:
            if any(self.set_of[at] is not owners for at in owners.free):
                raise PlanError("owners", owners.owners, "has blocks of others in its list")
        if not self._heap.covers(owners for owners in sets if owners.free):
            raise PlanError("eviction order", len(sets), "does not hold exactly the sets with free blocks")
        for owners in self._owned:
            steps = [self.owners.next_runs[owner][0] for owner in owners.owners]
            if not owners.has_steps(steps) or owners.members != self.set_of.count(owners):
                raise PlanError("owners", owners.owners, f"step {owners.step} of {steps}, {owners.members} members")
        for owner, found in self._by_owner.items():
            if found != {owners for owners in self._owned if owner in owners.owners}:
                raise PlanError("owner", owner, "its sets are not those that name it")
