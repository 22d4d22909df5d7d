"""One owner for every block: free, cached in the tree, or leased to a request.

| block of a lease    | owner | read by  | at `finish`                                       |
|---------------------|-------|----------|---------------------------------------------------|
| exact hit           | tree  | anybody  | stays cached, its lock goes                       |
| committed           | tree  | anybody  | stays cached, its lock goes                       |
| exact and full      | lease | its own  | enters the tree; freed if the tree has the same   |
| translated, partial | lease | its own  | freed; never in the tree                          |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kedge.cache.block_pool import BlockPool
from kedge.cache.eviction import EvictionPolicy, Namespace, lru
from kedge.cache.radix_tree import Inserted, Node, RadixTree
from kedge.errors import ConfigError, OutOfBlocks, PlanError
from kedge.types import RequestId


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest exact prefix on the device: `tokens_count` tokens in `blocks`."""

    blocks: tuple[int, ...]
    tokens_count: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A request's blocks in prompt order, fixed in place until it ends. The first `exact_tokens` tokens hold KV."""

    request_id: RequestId
    blocks: tuple[int, ...]
    exact_tokens: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since the start (admissions that were allowed to reuse, tokens, blocks), and blocks by owner now."""

    hits: int = 0
    misses: int = 0
    hit_tokens: int = 0
    missed_tokens: int = 0
    evictions: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    leased_blocks: int = 0


@dataclass(slots=True)
class _Holding:
    """A lease's inside: `node` is locked and ends `shared`, its tokens in the tree; `own` blocks belong to it."""

    lease: Lease
    namespace: Namespace
    node: Node
    shared: tuple[int, ...]
    own: set[int]


class CacheManager:
    """Exact prefix reuse over one pool of blocks. All calls come from one thread."""

    def __init__(self, num_blocks: int, block_size: int = 16, policy: EvictionPolicy = lru) -> None:
        """`block_size` in tokens. Raises `ConfigError` for sizes below one."""
        if block_size < 1:
            raise ConfigError("block_size", block_size, "a block holds at least one token")
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._pool = BlockPool(num_blocks)
        self._tree = RadixTree(block_size, policy)
        self._held: dict[RequestId, _Holding] = {}
        self._counts = CacheStats()

    def match(self, namespace: Namespace, tokens: Sequence[int]) -> Hit:
        """The longest exact prefix of `tokens`. A pure look-up: nothing is locked, nothing becomes more recent."""
        blocks = self._tree.match(namespace, tokens)
        return Hit(tuple(blocks), len(blocks) * self.block_size)

    def admit(
        self, request_id: RequestId, namespace: Namespace, tokens: Sequence[int], exact_limit: int, total_tokens: int
    ) -> Lease:
        """Leases blocks for `total_tokens`: the exact prefix, at most `exact_limit` tokens of it, and new blocks.

        Raises `OutOfBlocks`, having changed nothing, if eviction could not make room now; `PlanError` if the request
        holds a lease or `total_tokens` is less than may be reused.
        """
        if request_id in self._held:
            raise PlanError("request_id", request_id, "holds a lease already")
        reusable = tokens[: max(0, exact_limit)]
        if total_tokens < len(reusable):
            raise PlanError("total_tokens", total_tokens, f"{len(reusable)} tokens may be reused")
        node, hit = self._tree.lock(namespace, reusable)
        try:
            new = self._allocate(self._blocks_for(total_tokens) - len(hit), hit)
        except OutOfBlocks:
            self._tree.unlock(node)
            raise
        self._tree.touch(node)
        exact = len(hit) * self.block_size
        lease = Lease(request_id, (*hit, *new), exact)
        self._held[request_id] = _Holding(lease, namespace, node, tuple(reusable[:exact]), set(new))
        if exact_limit > 0:
            self._count_lookup(exact, len(tokens) - exact)
        return lease

    def extend(self, request_id: RequestId, total_tokens: int) -> Lease:
        """Grows a lease to `total_tokens`; new blocks follow the old ones. No change if it is that long already.

        Raises `OutOfBlocks`, having changed nothing, or `PlanError` without a lease.
        """
        held = self._holding(request_id)
        missing = self._blocks_for(total_tokens) - len(held.lease.blocks)
        if missing > 0:
            new = self._allocate(missing, held.lease.blocks)
            held.own.update(new)
            held.lease = replace(held.lease, blocks=(*held.lease.blocks, *new))
        return held.lease

    def commit_prefix(self, request_id: RequestId, exact_tokens: Sequence[int]) -> None:
        """Shares the first `len(exact_tokens)` tokens of a running lease, whose KV is final and exact (full blocks).

        The lease keeps its blocks, also those that the tree holds twice: these are freed when it ends. Raises
        `PlanError` without a lease, or where `exact_tokens` does not fit it.
        """
        held = self._holding(request_id)
        full = self._full_tokens(held, exact_tokens)
        if len(full) > len(held.shared):
            inserted = self._insert(held, full)
            self._tree.lock_path(inserted.node)
            self._tree.unlock(held.node)
            held.node, held.shared = inserted.node, full

    def finish(self, request_id: RequestId, exact_tokens: Sequence[int]) -> None:
        """Ends a lease. Its first `len(exact_tokens)` tokens are exact, identical to dense prefill, and enter the tree
        by full blocks; all other blocks (translated, partial, duplicate) are freed.

        Raises `PlanError` without a lease, or where `exact_tokens` does not fit it.
        """
        held = self._holding(request_id)
        full = self._full_tokens(held, exact_tokens)
        if full:
            self._insert(held, full)
        self._end(held)

    def abort(self, request_id: RequestId) -> None:
        """Ends a lease; what it had not committed is freed. Raises `PlanError` without a lease."""
        self._end(self._holding(request_id))

    def clear(self, namespace: Namespace) -> int:
        """Forgets what no lease holds in `namespace`; returns how many blocks that freed."""
        blocks = self._tree.clear(namespace)
        self._pool.free(blocks)
        return len(blocks)

    def clear_all(self) -> int:
        """`clear` for every namespace."""
        return sum(self.clear(namespace) for namespace in self._tree.namespaces())

    def reorder(self) -> None:
        """To be called when the policy's answers have changed, such as with a new forecast."""
        self._tree.reorder()

    def stats(self) -> CacheStats:
        """A snapshot."""
        free, cached = self._pool.num_free, self._tree.size
        leased = self.num_blocks - free - cached
        return replace(self._counts, free_blocks=free, cached_blocks=cached, leased_blocks=leased)

    def check_integrity(self) -> None:
        """Raises `PlanError` unless every block has exactly one owner and locks are those of the leases."""
        self._pool.check_integrity()
        self._tree.check_integrity(held.node for held in self._held.values())
        cached = [block for node in self._tree.nodes() for block in node.blocks]
        owned = cached + [block for held in self._held.values() for block in held.own]
        if len(owned) + self._pool.num_free != self.num_blocks or len(set(owned)) != len(owned):
            raise PlanError("owned blocks", sorted(owned), "free + cached + leased is not the pool")
        if any(self._pool.is_free(block) for block in owned):
            raise PlanError("owned blocks", sorted(owned), "one is free as well")
        for held in self._held.values():
            self._check_lease(held, set(cached))

    def _check_lease(self, held: _Holding, cached: set[int]) -> None:
        blocks = set(held.lease.blocks)
        if len(blocks) != len(held.lease.blocks) or not held.own <= blocks or not blocks - held.own <= cached:
            raise PlanError("lease", held.lease, "holds a block twice, or one that is neither its own nor cached")

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _holding(self, request_id: RequestId) -> _Holding:
        held = self._held.get(request_id)
        if held is None:
            raise PlanError("request_id", request_id, "holds no lease")
        return held

    def _allocate(self, n: int, following: Sequence[int]) -> list[int]:
        short = n - self._pool.num_free
        if short > 0:
            self._pool.free(self._tree.evict(short))
            self._counts = replace(self._counts, evictions=self._counts.evictions + short)
        return self._pool.allocate(n, after=following[-1] if following else None)

    def _full_tokens(self, held: _Holding, exact_tokens: Sequence[int]) -> tuple[int, ...]:
        """Those of `exact_tokens` that fill blocks. Raises `PlanError` if they do not fit the lease."""
        count = len(exact_tokens)
        if count > len(held.lease.blocks) * self.block_size:
            raise PlanError("exact_tokens", count, f"the lease has {len(held.lease.blocks)} blocks")
        full = tuple(exact_tokens[: count - count % self.block_size])
        if full[: len(held.shared)] != held.shared[: len(full)]:
            raise PlanError("exact_tokens", held.lease.request_id, "differ from the tokens the lease reads")
        return full

    def _insert(self, held: _Holding, full: tuple[int, ...]) -> Inserted:
        inserted = self._tree.insert(held.namespace, full, held.lease.blocks[: len(full) // self.block_size])
        held.own.difference_update(inserted.adopted)
        return inserted

    def _end(self, held: _Holding) -> None:
        del self._held[held.lease.request_id]
        self._tree.unlock(held.node)
        self._pool.free(held.own)

    def _count_lookup(self, exact: int, missed: int) -> None:
        counts = self._counts
        self._counts = replace(
            counts,
            hits=counts.hits + (exact > 0),
            misses=counts.misses + (exact == 0),
            hit_tokens=counts.hit_tokens + exact,
            missed_tokens=counts.missed_tokens + missed,
        )
