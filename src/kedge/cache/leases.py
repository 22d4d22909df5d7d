"""The blocks of requests: leased when one is admitted, shared or freed when it ends.

| block of a lease    | owner | read by  | at `finish`                                       |
|---------------------|-------|----------|---------------------------------------------------|
| exact hit           | tree  | anybody  | stays cached, its lock goes                       |
| committed           | tree  | anybody  | stays cached, its lock goes                       |
| exact and full      | lease | its own  | enters the tree; freed if the tree has the same   |
| translated, partial | lease | its own  | freed, or kept for its exact beginning            |
| borrowed            | both  | both     | freed with the last lease that holds it           |

Where the hit ends within a cached block, what of that is in the prompt is copied to the lease's first own block. Of a
fixed prompt that ends within a block, that block may enter the tree for its beginning (see `partial_blocks`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from kedge.cache.copies import CopyBeginning
from kedge.cache.counters import Reason
from kedge.cache.hits import Hits, extended
from kedge.cache.node import DEVICE, TreeNode
from kedge.cache.partial_blocks import Beginning, PartialBlocks
from kedge.cache.tiers import Tiers
from kedge.errors import OutOfBlocks, PlanError
from kedge.policies.prefetch import may_replace
from kedge.types import Namespace, RequestId, Span


@dataclass(frozen=True, slots=True)
class Lease:
    """A request's blocks in prompt order, fixed in place until it ends. The first `exact_tokens` tokens hold KV."""

    request_id: RequestId
    blocks: tuple[int, ...]
    exact_tokens: int
    spans: tuple[Span, ...] = ()
    """The exact tokens by source: `HOST` where a request had to wait for their load, else `DEVICE`."""


@dataclass(slots=True)
class Holding:
    """A lease's inside: `node` is locked and ends `shared`, its tokens in the tree; `own` blocks belong to it."""

    lease: Lease
    namespace: Namespace
    node: TreeNode
    shared: tuple[int, ...]
    own: set[int]


class Leases:
    """All leases, by request. Contracts are those of the methods of `CacheManager` of the same names."""

    def __init__(self, tiers: Tiers, copy_beginning: CopyBeginning | None) -> None:
        self._tiers, self._tree, self._block_size = tiers, tiers.tree, tiers.tree.block_size
        self._partial, self._hits = PartialBlocks(tiers.tree, copy_beginning), Hits(tiers)
        self._held: dict[RequestId, Holding] = {}
        self._borrowers: Counter[int] = Counter()
        """The blocks that several leases own, and how many own them besides one"""

    def holdings(self) -> Collection[Holding]:
        """Return the insides of all leases."""
        return self._held.values()

    def admit(
        self,
        request_id: RequestId,
        namespace: Namespace,
        tokens: Sequence[int],
        exact_limit: int,
        total_tokens: int,
        steps: float | None,
    ) -> Lease:
        """Lease blocks for a request that holds none."""
        self._require_none(request_id)
        reusable = tokens[: max(0, exact_limit)]
        if total_tokens < len(reusable):
            raise PlanError("total_tokens", total_tokens, f"{len(reusable)} tokens may be reused")
        node, hit = self._tree.lock(namespace, reusable)
        shared = tuple(reusable[: len(hit) * self._block_size])
        try:
            begun = self._partial.find(node, reusable[len(shared) :])
            new, copied = self._begin(begun, self._blocks_for(total_tokens) - len(hit), hit, steps)
        except BaseException:
            self._tree.unlock(node)
            raise
        self._tree.touch(node)
        exact = len(shared) + copied
        if exact_limit > 0:
            self._tiers.counters.lookup(exact, len(tokens) - exact, copied)
        lease = Lease(request_id, (*hit, *new), exact, extended(self._hits.count(node), copied))
        self._held[request_id] = Holding(lease, namespace, node, shared, set(new))
        return lease

    def extend(self, request_id: RequestId, total_tokens: int, steps: float | None) -> Lease:
        """Grow a lease to `total_tokens`."""
        held = self._holding(request_id)
        missing = self._blocks_for(total_tokens) - len(held.lease.blocks)
        if missing > 0:
            new = self._allocate(missing, held.lease.blocks, Reason.EXTEND, steps)
            held.own.update(new)
            held.lease = replace(held.lease, blocks=(*held.lease.blocks, *new))
        return held.lease

    def hand_over(self, request_id: RequestId, heir: RequestId) -> Lease:
        """Give a lease to another request, which holds none."""
        self._require_none(heir)
        held = self._holding(request_id)
        held.lease = replace(held.lease, request_id=heir)
        self._held[heir] = self._held.pop(request_id)
        return held.lease

    def borrow(self, request_id: RequestId, other: RequestId, places: Sequence[int]) -> Lease:
        """Let a lease hold blocks of another one in place of its own."""
        held, lender = self._holding(request_id), self._holding(other)
        blocks, its = list(held.lease.blocks), lender.lease.blocks
        if any(not 0 <= place < min(len(blocks), len(its)) for place in places):
            raise PlanError("places", places, "one of the leases has no block there")
        mine, theirs = {blocks[place] for place in places}, {its[place] for place in places}
        if not (mine <= held.own and theirs <= lender.own):
            raise PlanError("places", places, "a block there is cached")
        for place in places:
            blocks[place] = its[place]
        self._borrowers.update(theirs)
        self._free(mine)
        held.own = held.own - mine | theirs
        held.lease = replace(held.lease, blocks=tuple(blocks))
        return held.lease

    def commit_prefix(self, request_id: RequestId, exact_tokens: Sequence[int]) -> None:
        """Share the first tokens of a running lease, whose KV is final and exact."""
        held = self._holding(request_id)
        full = self._full_tokens(held, exact_tokens)
        if len(full) > len(held.shared):
            node = self._share(held, full)
            self._tree.lock_path(node)
            self._tree.unlock(held.node)
            held.node, held.shared = node, full

    def finish(self, request_id: RequestId, exact_tokens: Sequence[int], fixed: int) -> None:
        """End a lease whose first tokens are exact."""
        held = self._holding(request_id)
        full = self._full_tokens(held, exact_tokens)
        if full:
            self._share(held, full)
        if rest := exact_tokens[len(full) : fixed]:
            self._keep_beginning(held, full, rest)
        self._end(held)

    def abort(self, request_id: RequestId) -> None:
        """End a lease of which nothing more is shared."""
        self._end(self._holding(request_id))

    def check_integrity(self) -> None:
        """Raise `PlanError` unless each lease holds its own blocks and cached ones only, each once, and the blocks that
        several own are counted.
        """
        cached = {block for node in self._tree.nodes() for block in node.blocks[DEVICE]}
        for held in self._held.values():
            blocks = set(held.lease.blocks)
            if len(blocks) != len(held.lease.blocks) or not held.own <= blocks or not blocks - held.own <= cached:
                raise PlanError("lease", held.lease, "holds a block twice, or one that is neither its own nor cached")
        owners = Counter(block for held in self._held.values() for block in held.own)
        if self._borrowers != {block: count - 1 for block, count in owners.items() if count > 1}:
            raise PlanError("borrowers", self._borrowers, "are not what the leases own")

    def _require_none(self, request_id: RequestId) -> None:
        if request_id in self._held:
            raise PlanError("request_id", request_id, "holds a lease already")

    def _holding(self, request_id: RequestId) -> Holding:
        held = self._held.get(request_id)
        if held is None:
            raise PlanError("request_id", request_id, "holds no lease")
        return held

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _begin(self, begun: Beginning | None, n: int, hit: Sequence[int], steps: float | None) -> tuple[list[int], int]:
        """Allocate the blocks behind a hit and copy the beginning of the first one. Returns them, and how many tokens
        were copied: none where there is no other room than the block that has them.
        """
        if begun is not None and (new := self._allocate_beside(begun, n, hit, steps)) is not None:
            try:
                self._partial.copy(begun, new[0])
            except BaseException:
                self._tiers.pools[DEVICE].free(new)
                raise
            return new, begun.tokens
        return self._allocate(n, hit, Reason.ADMIT, steps), 0

    def _allocate_beside(self, begun: Beginning, n: int, hit: Sequence[int], steps: float | None) -> list[int] | None:
        """Allocate blocks so that what has a beginning stays. Returns None without room; no backup is given up."""
        self._tree.lock_path(begun.node)
        try:
            return self._take(n, hit, Reason.ADMIT, steps)
        except OutOfBlocks:
            return None
        finally:
            self._tree.unlock(begun.node)

    def _allocate(self, n: int, following: Sequence[int], reason: Reason, steps: float | None) -> list[int]:
        """Allocate blocks. Where a request needs them now, backups that hold what would have to go are given up, unless
        they have started.
        """
        try:
            return self._take(n, following, reason, steps)
        except OutOfBlocks:
            if steps is not None or not self._tiers.give_up_backups():
                raise
        return self._take(n, following, reason, steps)

    def _take(self, n: int, following: Sequence[int], reason: Reason, steps: float | None) -> list[int]:
        after = following[-1] if following else None
        if steps is None:
            return self._tiers.pools.allocate(DEVICE, n, reason, after)

        def may_go(victim: TreeNode) -> bool:
            return not victim.wanted and may_replace(victim, steps, self._tiers.settings.unlabelled_step)

        return self._tiers.pools.allocate(DEVICE, n, Reason.AHEAD, after, may_go)

    def _full_tokens(self, held: Holding, exact_tokens: Sequence[int]) -> tuple[int, ...]:
        """Return those of `exact_tokens` that fill blocks. Raises `PlanError` if they do not fit the lease."""
        count = len(exact_tokens)
        if count > len(held.lease.blocks) * self._block_size:
            raise PlanError("exact_tokens", count, f"the lease has {len(held.lease.blocks)} blocks")
        full = tuple(exact_tokens[: count - count % self._block_size])
        if full[: len(held.shared)] != held.shared[: len(full)]:
            raise PlanError("exact_tokens", held.lease.request_id, "differ from the tokens the lease reads")
        return full

    def _insert(self, held: Holding, tokens: tuple[int, ...]) -> TreeNode:
        """Put the blocks of a lease's first tokens into the tree. Returns the node of their end. Raises `PlanError` for
        borrowed ones.
        """
        blocks = held.lease.blocks[: len(tokens) // self._block_size]
        if not self._borrowers.keys().isdisjoint(blocks):
            raise PlanError("exact_tokens", held.lease.request_id, "reach into blocks that other leases hold as well")
        inserted = self._tree.insert(held.namespace, tokens, blocks)
        held.own.difference_update(inserted.adopted)
        return inserted.node

    def _share(self, held: Holding, full: tuple[int, ...]) -> TreeNode:
        """Put the full blocks of a lease into the tree, and back up what is hit often. Returns their last node."""
        node = self._insert(held, full)
        self._hits.back_up(node)
        return node

    def _keep_beginning(self, held: Holding, full: tuple[int, ...], rest: Sequence[int]) -> None:
        """Keep the block that begins with `rest`, unless one that does so is cached."""
        node, _ = self._tree.lock(held.namespace, full)
        if self._partial.keeps(node, rest):
            self._insert(held, (*full, *self._partial.padded(rest)))
        self._tree.unlock(node)

    def _free(self, blocks: set[int]) -> None:
        """Free blocks of a lease, but for those that another one owns as well."""
        borrowed = self._borrowers.keys() & blocks
        self._borrowers -= Counter(borrowed)
        self._tiers.pools[DEVICE].free(blocks - borrowed)

    def _end(self, held: Holding) -> None:
        del self._held[held.lease.request_id]
        self._tree.unlock(held.node)
        self._free(held.own)
