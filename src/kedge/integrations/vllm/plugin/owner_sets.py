"""The agents that own each of vLLM's blocks, and a linked list of the free blocks of every set of owners.

Lists run through the two links that vLLM's blocks have for its own free queue. Nothing here imports vLLM.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from kedge.errors import PlanError
from kedge.policies.eviction import EvictionKey
from kedge.structures.step_counts import StepCounts

Owner = Hashable
"""The agent whose fixed prompt a block holds: a `kedge.workflow.forecast.AgentKey`, or any other key."""


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

    __slots__ = ("head", "key", "last_access", "members", "owners", "queued", "step", "steps", "tail", "varying")

    def __init__(self, owners: frozenset[Owner] = frozenset(), varying: bool = False) -> None:
        self.owners, self.varying = owners, varying
        self.steps = StepCounts()
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
        if old is not None:
            self.steps.remove(old)
        if new is not None:
            self.steps.add(new)
        before, self.step = self.step, self.steps.least
        return before != self.step


class BlockOwners:
    """The owner set of every block and the step of every owner."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._steps: dict[Owner, float] = {}
        self.clear()

    def clear(self) -> None:
        """Make every block unowned. Steps stay known."""
        self.unowned, self.suffix = OwnerSet(), OwnerSet(varying=True)
        self.set_of = [self.unowned] * self._num_blocks
        """By block id"""
        self._by_owners: dict[frozenset[Owner], OwnerSet] = {}
        self._owned: set[OwnerSet] = set()
        """All sets with members that have or had owners; of two with the same owners `_by_owners` has one."""
        self._by_owner: dict[Owner, set[OwnerSet]] = {}

    def sets(self) -> list[OwnerSet]:
        """Return all sets that a block may be in."""
        return [self.unowned, self.suffix, *self._owned]

    @property
    def has_owned_blocks(self) -> bool:
        """Whether any block has, or had, an owner."""
        return bool(self._owned)

    def has_step(self, owner: Owner) -> bool:
        """Return whether the step of `owner` is known."""
        return owner in self._steps

    # blocks ---------------------------------------------------------------------------------------------------

    def add(self, block_ids: Iterable[int], owner: Owner) -> None:
        """Add `owner` to the owners of blocks that are in use. Raises `PlanError` for an owner without a step."""
        if owner not in self._steps:
            raise PlanError("owner", owner, "has no step")
        wider: dict[OwnerSet, OwnerSet] = {}
        for block_id in block_ids:
            present = self.set_of[block_id]
            if owner not in present.owners:
                if present not in wider:
                    wider[present] = self._find(present.owners | {owner})
                self._move(block_id, wider[present])

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

    def _move(self, block_id: int, owners: OwnerSet) -> None:
        before = self.set_of[block_id]
        self.set_of[block_id] = owners
        owners.members += 1
        self._remove_members(before, 1)

    def _remove_members(self, owners: OwnerSet, count: int) -> None:
        """Count members that have left. A set without members is dropped."""
        owners.members -= count
        if not owners.members and owners in self._owned:
            self._owned.discard(owners)
            if self._by_owners.get(owners.owners) is owners:
                del self._by_owners[owners.owners]
            for owner in owners.owners:
                self._by_owner[owner].discard(owners)

    # owners ---------------------------------------------------------------------------------------------------

    def update_steps(self, changes: Mapping[Any, tuple[float, float] | None]) -> list[OwnerSet]:
        """Take new steps (with probabilities, which are not used here); None removes an owner.

        Returns the sets whose least step has changed. O(owner sets of the changed owners).
        """
        changed: dict[OwnerSet, None] = {}
        for owner, next_run in changes.items():
            old = self._steps.pop(owner, None)
            new = None if next_run is None else next_run[0]
            if new is not None:
                self._steps[owner] = new
            if old != new:
                found = self._by_owner.get(owner, ())
                changed.update(dict.fromkeys(owners for owners in found if owners.change_step(old, new)))
                if new is None:
                    self._remove_owner(owner)
        return list(changed)

    def _remove_owner(self, owner: Owner) -> None:
        """Take `owner` from its sets. Blocks without other owners compete like unowned ones from now on."""
        for owners in self._by_owner.pop(owner, set()):
            others = owners.owners - {owner}
            if self._by_owners.get(owners.owners) is owners:
                del self._by_owners[owners.owners]
            owners.owners = others
            if others:
                self._index(owners)

    def _find(self, owners: frozenset[Owner]) -> OwnerSet:
        """Return the set with exactly these owners, new where there is none."""
        found = self._by_owners.get(owners)
        if found is None:
            found = OwnerSet(owners)
            for owner in owners:
                found.change_step(None, self._steps[owner])
            self._owned.add(found)
            self._index(found)
        return found

    def _index(self, owners: OwnerSet) -> None:
        self._by_owners.setdefault(owners.owners, owners)
        for owner in owners.owners:
            self._by_owner.setdefault(owner, set()).add(owners)

    def check_integrity(self) -> None:
        """Raise `PlanError` unless the step and the members of every owned set agree with the books."""
        for owners in self._owned:
            steps = [self._steps[owner] for owner in owners.owners]
            if owners.step != min(steps, default=None) or owners.members != self.set_of.count(owners):
                raise PlanError("owners", owners.owners, f"step {owners.step} of {steps}, {owners.members} members")
