"""vLLM's free blocks in the order of an eviction policy (KVFlow, section 3.1), in place of its own free queue.

Blocks without KV worth keeping go first, as in vLLM. The others lie in one linked list for each set of agents that own
them, oldest first, through the two links that vLLM's blocks have for that; a heap over the sets says which list is
next. So a new step of an agent costs by its sets and not by its blocks, taking a block out costs what it costs in vLLM,
and evicting costs a look at the heap for a run of blocks. Nothing here imports vLLM.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Protocol

from kedge.errors import PlanError
from kedge.policies.eviction import EvictionKey, StepPolicy, StepView
from kedge.structures.lazy_heap import LazyHeap
from kedge.structures.step_counts import StepCounts

Owner = Hashable
"""Whose fixed prompt a block is in: a `kedge.workflow.forecast.AgentKey`, or anything else that can be a key."""


class Block(Protocol):
    """A block of vLLM's (`KVCacheBlock`); the links are the queue's own."""

    block_id: int
    prev_free_block: Any
    next_free_block: Any


class _End:
    """Stands before the first or after the last block of a list, so that every block has two neighbours."""

    __slots__ = ("block_id", "next_free_block", "prev_free_block")

    def __init__(self) -> None:
        self.block_id = -1
        self.prev_free_block: Any = None
        self.next_free_block: Any = None


class OwnerSet:
    """Who owns a block, and the free blocks that have exactly these owners. What an eviction policy looks at."""

    __slots__ = ("head", "key", "last_access", "members", "owners", "queued", "step", "steps", "tail", "varying")

    def __init__(self, owners: frozenset[Owner] = frozenset(), varying: bool = False) -> None:
        self.owners, self.varying = owners, varying
        self.steps = StepCounts()
        self.step: float | None = None
        self.last_access = 0
        self.members = 0
        """Blocks that have these owners, free or not; not counted for the two sets that nobody owns."""
        self.key: EvictionKey = ()
        self.queued = False
        """Whether the heap, or the queue's hand, has it."""
        self.head, self.tail = _End(), _End()
        self.head.next_free_block, self.tail.prev_free_block = self.tail, self.head

    @property
    def is_empty(self) -> bool:
        return self.head.next_free_block is self.tail

    def __iter__(self) -> Iterator[Any]:
        block = self.head.next_free_block
        while block is not self.tail:
            yield block
            block = block.next_free_block

    def change(self, old: float | None, new: float | None) -> bool:
        """One owner's step changes; whether that of the set does."""
        if old is not None:
            self.steps.remove(old)
        if new is not None:
            self.steps.add(new)
        before, self.step = self.step, self.steps.least
        return before != self.step


class StepFreeQueue:
    """A drop-in for `vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue`. Without owners: its order, to the letter.

    A block's owners are set while somebody holds it, and forgotten with its KV.
    """

    def __init__(self, blocks: Sequence[Block], num_blocks: int, policy: StepPolicy) -> None:
        """`blocks` are free now, first to be used first; block ids are below `num_blocks`."""
        self.evicted: Counter[str] = Counter()
        """Blocks with KV that were handed out, by step: "varying", "unlabelled", "inf" (unknown), or the number."""
        self._policy, self._num_blocks = policy, num_blocks
        self._steps: dict[Owner, float] = {}
        self._start(blocks)

    def _start(self, blocks: Sequence[Block]) -> None:
        """`blocks` are free, and no block has KV."""
        self.num_free_blocks = 0
        self._loose, self._plain, self._suffix = OwnerSet(), OwnerSet(), OwnerSet(varying=True)
        self._of = [self._plain] * self._num_blocks
        self._stamps = [0] * self._num_blocks
        self._clock = 0
        self._heap: LazyHeap[OwnerSet] = LazyHeap(attrgetter("key"), lambda _: True)
        self._hand: OwnerSet | None = None
        """The set whose blocks go next, those with stamps up to `_bound`."""
        self._bound = math.inf
        self._sets: dict[frozenset[Owner], OwnerSet] = {}
        self._owned: set[OwnerSet] = set()
        """All sets with members that somebody owns or has owned; of two with the same owners, `_sets` has one."""
        self._sets_of: dict[Owner, set[OwnerSet]] = {}
        self.prepend_n(blocks)

    # what vLLM calls ------------------------------------------------------------------------------------------

    def popleft(self) -> Any:
        """The first free block. Raises `ValueError` where there is none, as vLLM's."""
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        """The first `n` free blocks. Raises `PlanError` where there are fewer."""
        if n > self.num_free_blocks:
            raise PlanError("n", n, f"only {self.num_free_blocks} blocks are free")
        self.num_free_blocks -= n
        taken: list[Any] = []
        _take(self._loose, n, taken)
        while len(taken) < n:
            self._evict(n, taken)
        return taken

    def remove(self, block: Block) -> None:
        """Takes a block out of its list, whichever that is. Raises `PlanError` if it is in none."""
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:
            raise PlanError("block", block.block_id, "is not free")
        before.next_free_block = after
        after.prev_free_block = before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: Block) -> None:
        """A block whose KV is worth keeping is free."""
        self.append_n([block])

    def append_n(self, blocks: Sequence[Block]) -> None:
        """Blocks whose KV is worth keeping are free; of those with the same owners the first goes first."""
        of, stamps, clock = self._of, self._stamps, self._clock
        owners: OwnerSet | None = None
        last: Any = None
        for block in blocks:
            mine = of[block.block_id]
            if mine is not owners:
                clock += 1
                if owners is not None:
                    self._close(owners, last)
                owners, last = mine, mine.tail.prev_free_block
            stamps[block.block_id] = clock
            block.prev_free_block = last
            last.next_free_block = block
            last = block
        self._clock = clock
        if owners is not None:
            self._close(owners, last)
        self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        """Blocks without KV worth keeping are free; the first of them goes before all others."""
        last: Any = self._loose.head
        after = last.next_free_block
        for block in blocks:
            if self._of[block.block_id] is not self._plain:
                self._forget(self._of[block.block_id], [block])
            block.prev_free_block = last
            last.next_free_block = block
            last = block
        last.next_free_block = after
        after.prev_free_block = last
        self.num_free_blocks += len(blocks)

    def get_all_free_blocks(self) -> list[Any]:
        """All free blocks in the order in which they would go. Costs by their number."""
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: Block | None) -> Iterator[Any]:
        """The free blocks that go after `cursor` (None: all), in the order in which they would go."""
        kept = [(self._key_at(owners, block), block) for owners in self._all_sets() for block in owners]
        kept.sort(key=lambda pair: pair[0])
        order = [*self._loose, *(block for _, block in kept)]
        start = 0 if cursor is None else order.index(cursor) + 1
        yield from order[start:]

    # owners ---------------------------------------------------------------------------------------------------

    def knows(self, owner: Owner) -> bool:
        """Whether `owner` has a step."""
        return owner in self._steps

    def own(self, block_ids: Iterable[int], owner: Owner) -> None:
        """Blocks that somebody holds belong to the fixed prompt of `owner`, whose step is known. Raises `PlanError`
        where it is not."""
        if owner not in self._steps:
            raise PlanError("owner", owner, "has no step")
        wider: dict[OwnerSet, OwnerSet] = {}
        for block_id in block_ids:
            mine = self._of[block_id]
            if owner not in mine.owners:
                if mine not in wider:
                    wider[mine] = self._set(mine.owners | {owner})
                self._give(block_id, wider[mine])

    def follow(self, block_ids: Iterable[int]) -> None:
        """Blocks that somebody holds follow a fixed prompt; those that are in another one stay there."""
        for block_id in block_ids:
            if self._of[block_id] is self._plain:
                self._of[block_id] = self._suffix

    def on_forecast(self, changes: Mapping[Any, tuple[float, float] | None]) -> None:
        """Takes new steps (and probabilities, which do not matter here); None: the owner is forgotten.

        Costs by the owner sets of the changed owners.
        """
        for owner, next_run in changes.items():
            old = self._steps.pop(owner, None)
            new = None if next_run is None else next_run[0]
            if new is not None:
                self._steps[owner] = new
            if old == new:
                continue
            for owners in self._sets_of.get(owner, ()):
                if owners.change(old, new) and owners.queued:
                    self._enter(owners)
            if new is None:
                self._disown(owner)

    def forget_blocks(self) -> None:
        """The prefix cache was emptied: no free block has KV, and no block belongs to anybody. Steps stay known."""
        self._start([*self._loose, *(block for owners in self._all_sets() for block in owners)])

    def has_room(self, blocks: int, allowed: Callable[[StepView], bool]) -> bool:
        """Whether so many free blocks have no KV worth keeping, or are in sets that `allowed` gives away."""
        for owners in (self._loose, *(owners for owners in self._all_sets() if allowed(owners))):
            for _ in owners:
                if not blocks:
                    return True
                blocks -= 1
        return blocks <= 0

    def check_integrity(self) -> None:
        """Raises `PlanError` unless links, counts and steps agree and every set with free blocks can be found."""
        listed = [self._loose, *self._all_sets()]
        blocks = [block for owners in listed for block in owners]
        if len({block.block_id for block in blocks}) != len(blocks) or len(blocks) != self.num_free_blocks:
            raise PlanError("num_free_blocks", self.num_free_blocks, f"{len(blocks)} are in lists")
        for owners in self._owned:
            steps = [self._steps[owner] for owner in owners.owners]
            if owners.step != min(steps, default=None) or owners.members != self._of.count(owners):
                raise PlanError("owners", owners.owners, f"step {owners.step} of {steps}, {owners.members} members")
        for owners in listed[1:]:
            if not owners.is_empty and not owners.queued:
                raise PlanError("owners", owners.owners, "has free blocks and is in no queue")

    # inside ---------------------------------------------------------------------------------------------------

    def _evict(self, n: int, taken: list[Any]) -> None:
        """Takes blocks of the set that is next, until there are `n`, or another set is next."""
        owners = self._hand or self._choose()
        start = len(taken)
        if math.isinf(self._bound):
            _take(owners, n, taken)
        else:
            self._take_bounded(owners, n, taken)
        count = len(taken) - start
        self.evicted[_step_name(owners)] += count
        if owners is not self._plain:
            self._forget(owners, taken[start:])
        if owners.is_empty:
            self._hand, owners.queued = None, False
        elif not count or self._stamps[owners.head.next_free_block.block_id] > self._bound:
            self._enter(owners)

    def _take_bounded(self, owners: OwnerSet, n: int, taken: list[Any]) -> None:
        stamps, bound = self._stamps, self._bound
        count = 0
        for block in owners:
            if count >= n - len(taken) or stamps[block.block_id] > bound:
                break
            count += 1
        _take(owners, len(taken) + count, taken)

    def _choose(self) -> OwnerSet:
        """The set whose oldest block is next goes into the hand, with the stamp up to which it stays there."""
        chosen = self._pop()
        if chosen is None:
            raise PlanError("num_free_blocks", self.num_free_blocks, "are in no list")
        self._bound = math.inf
        if rival := self._pop():
            if rival.key[:-1] == chosen.key[:-1]:
                self._bound = rival.last_access
            self._heap.push(rival)
        self._hand = chosen
        return chosen

    def _pop(self) -> OwnerSet | None:
        """The set with the least key; one whose oldest blocks have gone since it was entered is entered again."""
        while owners := self._heap.pop():
            if owners.is_empty:
                owners.queued = False
                continue
            before = owners.key
            self._look(owners)
            if owners.key == before:
                return owners
            self._heap.push(owners)
        return None

    def _enter(self, owners: OwnerSet) -> None:
        """Puts a set into the heap under its present key, and what is in the hand back too: it may be next no more."""
        if self._hand is not None and self._hand is not owners:
            self._push(self._hand)
        self._hand = None
        self._push(owners)

    def _push(self, owners: OwnerSet) -> None:
        owners.queued = not owners.is_empty
        if owners.queued:
            self._look(owners)
            self._heap.push(owners)

    def _look(self, owners: OwnerSet) -> None:
        """Brings the key of a set with free blocks up to date: it is that of its oldest one."""
        owners.key = self._key_at(owners, owners.head.next_free_block)

    def _key_at(self, owners: OwnerSet, block: Any) -> EvictionKey:
        owners.last_access = self._stamps[block.block_id]
        return self._policy(owners)

    def _close(self, owners: OwnerSet, last: Any) -> None:
        """Ends a run of appended blocks."""
        last.next_free_block = owners.tail
        owners.tail.prev_free_block = last
        if not owners.queued:
            self._enter(owners)

    def _forget(self, owners: OwnerSet, blocks: list[Any]) -> None:
        for block in blocks:
            self._of[block.block_id] = self._plain
        self._leave(owners, len(blocks))

    def _leave(self, owners: OwnerSet, count: int) -> None:
        """So many blocks have other owners now. A set without blocks is forgotten."""
        owners.members -= count
        if not owners.members and owners in self._owned:
            self._owned.discard(owners)
            self._unlist(owners)

    def _unlist(self, owners: OwnerSet) -> None:
        """The set is not found by its owners any more."""
        if self._sets.get(owners.owners) is owners:
            del self._sets[owners.owners]
        for owner in owners.owners:
            self._sets_of[owner].discard(owners)

    def _give(self, block_id: int, owners: OwnerSet) -> None:
        mine = self._of[block_id]
        self._of[block_id] = owners
        owners.members += 1
        self._leave(mine, 1)

    def _set(self, owners: frozenset[Owner]) -> OwnerSet:
        known = self._sets.get(owners)
        if known is None:
            known = OwnerSet(owners)
            for owner in owners:
                known.change(None, self._steps[owner])
            self._owned.add(known)
            self._list(known)
        return known

    def _list(self, owners: OwnerSet) -> None:
        self._sets.setdefault(owners.owners, owners)
        for owner in owners.owners:
            self._sets_of.setdefault(owner, set()).add(owners)

    def _disown(self, owner: Owner) -> None:
        """Nothing belongs to `owner` any more. What belonged to nobody else competes as if it never had."""
        for owners in self._sets_of.pop(owner, set()):
            others = owners.owners - {owner}
            if self._sets.get(owners.owners) is owners:
                del self._sets[owners.owners]
            owners.owners = others
            if others:
                self._list(owners)

    def _all_sets(self) -> list[OwnerSet]:
        return [self._plain, self._suffix, *self._owned]


def _take(owners: OwnerSet, n: int, taken: list[Any]) -> None:
    """Moves a set's first blocks to `taken`, until that has `n`, or the set has none."""
    block, tail = owners.head.next_free_block, owners.tail
    for _ in range(n - len(taken)):
        if block is tail:
            break
        taken.append(block)
        after = block.next_free_block
        block.prev_free_block = block.next_free_block = None
        block = after
    owners.head.next_free_block = block
    block.prev_free_block = owners.head


def _step_name(owners: OwnerSet) -> str:
    """As the embedded engine's cache counts it (`CacheStats.evictions_by_step`)."""
    if owners.step is None:
        return "varying" if owners.varying else "unlabelled"
    return f"{owners.step:g}"
