"""The agents that own each of vLLM's blocks, and a linked list of the free blocks of every set of owners.

Lists run through the two links that vLLM's blocks have for its own free queue. Nothing here imports vLLM.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from kedge.errors import PlanError
from kedge.policies.eviction import EvictionKey
from kedge.structures.heaps import StepCounts
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
