"""One owner for every block: free, cached in the tree, in flight between the tiers, or leased by a request.

A lease never holds a block that is still loading. A scheduler asks `demand` for what is on the host, lets others go
first while it loads, and admits (which looks again, then locks) once there is nothing to wait for; or at any time,
and then the rest is recomputed. Without a host tier and without labels this is a plain prefix cache.

| block of a lease    | owner | read by  | at `finish`                                       |
|---------------------|-------|----------|---------------------------------------------------|
| exact hit           | tree  | anybody  | stays cached, its lock goes                       |
| committed           | tree  | anybody  | stays cached, its lock goes                       |
| exact and full      | lease | its own  | enters the tree; freed if the tree has the same   |
| translated, partial | lease | its own  | freed, or kept for its exact beginning            |

Where the hit ends within a cached block, the prompt's part of it is copied to the lease's first own block. Of a fixed
prompt that ends within a block, that block may enter the tree for its beginning (see `PartialBlocks`).
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

from kedge.cache.copies import Copier, CopyBeginning, Direction, Outcome, Purpose
from kedge.cache.loads import Demands, Readiness, Status, readiness_of
from kedge.cache.node import DEVICE, HOST, Tier, TreeNode
from kedge.cache.owners import Owner, Prefetcher
from kedge.cache.radix_tree import RadixTree
from kedge.cache.tiers import CacheStats, Tiers, missing
from kedge.errors import ConfigError, OutOfBlocks, PlanError
from kedge.policies.eviction import EvictionPolicy, NextRuns, StepView, lru
from kedge.policies.prefetch import is_awaited, is_within, may_replace
from kedge.settings import TierSettings
from kedge.types import Namespace, RequestId, Source, Span, TenantId

NO_TOKEN = -1
SHARE = 4
"""At least one token of so many in a block is copied: of fewer, prompts have as many in common by chance"""
LOOKED_AT = 32
"""Children of a node that are compared, of thousands that there may be: the ones that begin most like the prompt"""


class PartialBlocks:
    """The beginnings of blocks, copied where a prompt leaves what is cached within a block. Without `copy` nothing is
    found and nothing kept.

    An agent's fixed prompt of 30 tokens fills one block of 16 and 14 tokens of the next one, which goes on differently
    in each of its prompts. That block cannot be shared. But a request has a block of its own for these tokens anyway,
    and gets their KV from any cached block that begins with them after the same prefix.

    Where an agent's prompts are translated from the first one on, no block with its fixed prompt's end is exact as a
    whole. Then that block is kept as if it went on with tokens that there are not, so that no prompt matches all of it.
    """

    def __init__(self, tree: RadixTree, copy: CopyBeginning | None) -> None:
        self._tree, self._copy = tree, copy

    def find(self, node: TreeNode, tokens: Sequence[int]) -> tuple[int, TreeNode]:
        """Return how many of `tokens` a block on the device after `node` begins with, at most, and that block's node.
        Of equal ones the last used wins. The block is split off, so that it alone counts as used.
        """
        same, child = self._longest(node, tokens) if self._copy else (0, node)
        if not self._is_enough(same):
            return 0, node
        return same, child if child.size == 1 else self._tree.split(child, 1)

    def _longest(self, node: TreeNode, tokens: Sequence[int]) -> tuple[int, TreeNode]:
        if not node.children or not tokens:
            return 0, node
        closest = node.children.nearest(self._tree.packed(tokens[: self._tree.block_size]), LOOKED_AT)
        found = ((self._tree.tokens_in(same), child) for same, child in closest if child.blocks[DEVICE])
        return max(found, key=lambda one: (one[0], one[1].last_access), default=(0, node))

    def copy(self, source: TreeNode, target: int, tokens: int) -> None:
        """Copy the beginning of an unlocked node's block to the `target` block, and count it as used."""
        assert self._copy is not None
        self._copy(source.blocks[DEVICE][0], target, tokens)
        self._tree.touch(source)

    def keeps(self, node: TreeNode, tokens: Sequence[int]) -> bool:
        """Return whether to keep a block that goes on after `node` with `tokens`: no other one does so."""
        has_copy = self._copy is not None and self._is_enough(len(tokens))
        return has_copy and self._longest(node, tokens)[0] < len(tokens)

    def _is_enough(self, tokens: int) -> bool:
        return tokens * SHARE >= self._tree.block_size

    def padded(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of a block that can be used only up to here: the rest equals no prompt's."""
        return (*tokens, *[NO_TOKEN] * (self._tree.block_size - len(tokens)))


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


class CacheManager:
    """Exact prefix reuse over a pool of device blocks, backed by one of host blocks. All calls come from one thread."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        policy: EvictionPolicy = lru,
        tiers: TierSettings | None = None,
        copier: Copier | None = None,
        block_bytes: int = 1,
        copy_beginning: CopyBeginning | None = None,
    ) -> None:
        """Begin with an empty cache; `block_size` is in tokens, `block_bytes` the size of one block's KV. Without
        `copy_beginning` only whole blocks are reused. Raises `ConfigError` for sizes below one, or a host tier without
        a copier.
        """
        sizes = {"block_size": block_size, "block_bytes": block_bytes, "num_blocks": num_blocks}
        for name, size in sizes.items():
            if size < 1:
                raise ConfigError(name, size, "must be at least 1")
        self.block_size, self.num_blocks = block_size, num_blocks
        self.tiers = Tiers(num_blocks, block_size, policy, tiers or TierSettings(), copier, block_bytes)
        self._tree = self.tiers.tree
        self._demands = Demands(self.tiers)
        self._owners = self._tree.labels.owners
        self.prefetcher = Prefetcher(self._owners, self._lacking, self._prefetch, self.tiers.settings.unlabelled_step)
        self._partial = PartialBlocks(self._tree, copy_beginning)
        self._held: dict[RequestId, Holding] = {}

    # requests -------------------------------------------------------------------------------------------------

    def match(self, namespace: Namespace, tokens: Sequence[int]) -> list[int]:
        """Return the blocks of the longest exact prefix of `tokens` on the device. A pure look-up: nothing is locked or
        touched.
        """
        return self._tree.walk(namespace, tokens, DEVICE).device_blocks()

    def status(self, namespace: Namespace, tokens: Sequence[int]) -> Status:
        """Return where the longest exact prefix of `tokens` is, in both tiers. A pure look-up."""
        walk = self._tree.walk(namespace, tokens)
        nodes = walk.node.path_down()
        device = sum(len(node.blocks[DEVICE]) for node in nodes)
        if walk.node.blocks[DEVICE]:
            device -= walk.node.size - walk.used
        on_device = device * self.block_size
        return Status(readiness_of(nodes), on_device, self._tree.tokens_in(walk.length) - on_device)

    def demand(self, request_id: RequestId, namespace: Namespace, tokens: Sequence[int]) -> Readiness:
        """Load the part of the longest exact prefix of `tokens` that only the host has, or join its loads under way.

        Call this in every step until it answers `READY`, or until the caller has waited long enough and admits the
        request without it. `LOADABLE`: there is no room now; every `pump` tries again, before anything is prefetched.
        `READY` is also the answer where a copy has failed, or computing costs less than loading.
        """
        return self._demands.demand(request_id, namespace, tokens)

    def withdraw(self, request_id: RequestId) -> None:
        """Forget what a request demanded: it will not be admitted."""
        self._demands.withdraw(request_id)

    def admit(
        self,
        request_id: RequestId,
        namespace: Namespace,
        tokens: Sequence[int],
        exact_limit: int,
        total_tokens: int,
        steps: float | None = None,
    ) -> Lease:
        """Lease blocks for `total_tokens`: the exact prefix, at most `exact_limit` tokens of it, and new blocks. Where
        the prefix ends within a cached block, its part of that has been copied to the first new one.

        With `steps` the request is speculative, and only what is needed later than so many steps ahead is evicted.
        Raises `OutOfBlocks`, having changed nothing, if eviction could not make room now; `PlanError` if the request
        holds a lease or `total_tokens` is less than may be reused.
        """
        self._require_none(request_id)
        reusable = tokens[: max(0, exact_limit)]
        if total_tokens < len(reusable):
            raise PlanError("total_tokens", total_tokens, f"{len(reusable)} tokens may be reused")
        node, hit = self._tree.lock(namespace, reusable)
        shared = tuple(reusable[: len(hit) * self.block_size])
        try:
            begun = self._partial.find(node, reusable[len(shared) :])
            new, copied = self._begin(*begun, self._blocks_for(total_tokens) - len(hit), hit, steps)
        except BaseException:
            self._tree.unlock(node)
            raise
        self._tree.touch(node)
        exact = len(shared) + copied
        if exact_limit > 0:
            counters = self.tiers.counters
            counters["hits"] += exact > 0
            counters["misses"] += exact == 0
            counters["hit_tokens"] += exact
            counters["copied_hit_tokens"] += copied
            counters["missed_tokens"] += len(tokens) - exact
        lease = Lease(request_id, (*hit, *new), exact, self._count_hit(node, copied))
        self._held[request_id] = Holding(lease, namespace, node, shared, set(new))
        self._demands.withdraw(request_id)
        return lease

    def extend(self, request_id: RequestId, total_tokens: int, steps: float | None = None) -> Lease:
        """Grow a lease to `total_tokens`; new blocks follow the old ones. No change if it is that long already. `steps`
        as for `admit`. Raises `OutOfBlocks`, having changed nothing, or `PlanError` without a lease.
        """
        held = self._holding(request_id)
        missing = self._blocks_for(total_tokens) - len(held.lease.blocks)
        if missing > 0:
            new = self._allocate(missing, held.lease.blocks, steps)
            held.own.update(new)
            held.lease = replace(held.lease, blocks=(*held.lease.blocks, *new))
        return held.lease

    def hand_over(self, request_id: RequestId, heir: RequestId) -> Lease:
        """Give a lease to the request `heir`, which demands nothing more. Raises `PlanError` without a lease, or where
        the heir holds one.
        """
        self._require_none(heir)
        held = self._holding(request_id)
        held.lease = replace(held.lease, request_id=heir)
        self._held[heir] = self._held.pop(request_id)
        self._demands.withdraw(heir)
        return held.lease

    def commit_prefix(self, request_id: RequestId, exact_tokens: Sequence[int]) -> None:
        """Share the first `len(exact_tokens)` tokens of a running lease, whose KV is final and exact (full blocks).

        The lease keeps all of its blocks. Blocks that the tree has already are freed when it ends. Raises `PlanError`
        without a lease, or where `exact_tokens` does not fit it.
        """
        held = self._holding(request_id)
        full = self._full_tokens(held, exact_tokens)
        if len(full) > len(held.shared):
            node = self._share(held, full)
            self._tree.lock_path(node)
            self._tree.unlock(held.node)
            held.node, held.shared = node, full

    def finish(self, request_id: RequestId, exact_tokens: Sequence[int], fixed: int = 0) -> None:
        """End a lease. Its first `len(exact_tokens)` tokens are exact, identical to dense prefill, and enter the tree
        by full blocks, and the beginning of the block in which the first `fixed` of them end. All others are freed.

        Raises `PlanError` without a lease, or where `exact_tokens` does not fit it.
        """
        held = self._holding(request_id)
        full = self._full_tokens(held, exact_tokens)
        if full:
            self._share(held, full)
        if rest := exact_tokens[len(full) : fixed]:
            node, _ = self._tree.lock(held.namespace, full)
            if self._partial.keeps(node, rest):
                self._insert(held, (*full, *self._partial.padded(rest)))
            self._tree.unlock(node)
        self._end(held)

    def abort(self, request_id: RequestId) -> None:
        """End a lease; what it had not committed is freed. Raises `PlanError` without a lease."""
        self._end(self._holding(request_id))

    # the workflow ---------------------------------------------------------------------------------------------

    def on_label(self, namespace: Namespace, key: Owner, tokens: Sequence[int], backed_up: bool = True) -> int:
        """Label the end of the cached part of `tokens`, the fixed prompt or the history of `key`, and back it up.

        The end is floored to a block. A key has one label: the newest. Returns how many tokens it covers. Call this
        once the prompt is cached (after `commit_prefix` or `finish`), at every call of the agent. A key that no
        forecast knows gets the backup and no label.
        """
        node, step = self._tree.end(namespace, tokens), self._owners.step(key)
        if node and step is not None:
            self._tree.labels.put(key, node)
            self._tree.offer(*self._tree.join_path(node))
        if node and backed_up:
            self.tiers.back_up(node)
        if node is None or step is None:
            return 0
        self.prefetcher.due = True
        return sum(step.size for step in node.path()) * self.block_size

    def on_forecast(self, changes: NextRuns[Any]) -> None:
        """Take the changes of the forecast. O(changed keys x depth of their labels)."""
        self._owners.on_forecast(changes)
        for transfer in self.tiers.transfers.pending(Direction.LOAD):
            if not (transfer.demanded or is_within(transfer.end.step, self.prefetcher.window)):
                self.tiers.cancel(transfer)

    def pump(self) -> bool:
        """Land what has been copied, try denied demands again, prefetch, and hand new copies to the copier.

        Returns whether any copy has ended. Call this in every step, whatever the queue, and from time to time while
        nothing runs but copies do.
        """
        ended = self.tiers.drain()
        self.prefetcher.due |= any(one.outcome is not Outcome.FAILED for one in ended)
        if not self._demands.retry() and self.tiers.host_blocks:
            self.prefetcher.start(self.tiers.pending())
        return bool(ended)

    @property
    def version(self) -> int:
        """A number that grows whenever answers of `match` or `status` may have changed."""
        return self._tree.version

    @property
    def starved(self) -> bool:
        """Whether a demanded load finds no room on the device."""
        return self._demands.denied

    @property
    def transferring(self) -> bool:
        """Whether a copy is queued or under way: blocks may come free without any request ending."""
        return bool(self.tiers.pending())

    def limit_host(self, tenant: TenantId, nbytes: int | None) -> None:
        """Limit the host bytes of a tenant from its next copy on, in whole blocks; None is no limit.

        A tenant at its limit evicts its own copies, never another tenant's.
        """
        if nbytes is None:
            self.tiers.limits.pop(tenant, None)
        else:
            self.tiers.limits[tenant] = nbytes // self.tiers.block_bytes

    def set_policy(self, policy: EvictionPolicy) -> EvictionPolicy:
        """Evict from now on by `policy`, in both tiers; returns the one before. O(n log n) in the tree's nodes."""
        before, self._tree.policy = self._tree.policy, policy
        self._tree.offer(*self._tree.nodes())
        return before

    # upkeep ---------------------------------------------------------------------------------------------------

    def clear(self) -> int:
        """Forget what no lease and no copy holds. Returns how many blocks went."""
        return sum(map(self.tiers.clear, self._tree.namespaces()))

    def stats(self) -> CacheStats:
        """Return a snapshot of the figures."""
        tiers, counted, block_bytes = self.tiers, self.tiers.counters, self.tiers.block_bytes
        device, host = (pool.num_free for pool in tiers.pools)
        cached, host_cached = (tiers.tree.shares[tier].size for tier in Tier)
        loading, offloading = (len(tiers.in_flight(way)) for way in (Direction.LOAD, Direction.OFFLOAD))
        return CacheStats(
            **counted,
            transfers=deepcopy(tiers.ended),
            bytes_loaded=counted["blocks_loaded"] * block_bytes,
            bytes_offloaded=counted["blocks_offloaded"] * block_bytes,
            free_blocks=device,
            cached_blocks=cached,
            leased_blocks=self.num_blocks - device - cached - loading,
            loading_blocks=loading,
            host_free_blocks=host,
            host_cached_blocks=host_cached,
            offloading_blocks=offloading,
        )

    def check_integrity(self) -> None:
        """Raise `PlanError` unless every block of both tiers has exactly one owner, locks are those of leases and
        transfers, every state is legal and priorities and queues are what a naive look gives.
        """
        leased = [block for held in self._held.values() for block in held.own]
        self.tiers.check_integrity(leased, [held.node for held in self._held.values()])
        self._demands.check_integrity()
        cached = {block for node in self._tree.nodes() for block in node.blocks[DEVICE]}
        for held in self._held.values():
            blocks = set(held.lease.blocks)
            if len(blocks) != len(held.lease.blocks) or not held.own <= blocks or not blocks - held.own <= cached:
                raise PlanError("lease", held.lease, "holds a block twice, or one that is neither its own nor cached")

    # the insides of leases ------------------------------------------------------------------------------------

    def _require_none(self, request_id: RequestId) -> None:
        if request_id in self._held:
            raise PlanError("request_id", request_id, "holds a lease already")

    def _holding(self, request_id: RequestId) -> Holding:
        held = self._held.get(request_id)
        if held is None:
            raise PlanError("request_id", request_id, "holds no lease")
        return held

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _begin(
        self, tokens: int, source: TreeNode, n: int, hit: Sequence[int], steps: float | None
    ) -> tuple[list[int], int]:
        """Allocate the blocks behind a hit, and copy so many tokens of `source` to the first one. Returns the blocks,
        and the number of tokens copied: 0 where only `source` itself could make room.
        """
        new: list[int] = []
        if tokens:
            self._tree.lock_path(source)
            try:
                with suppress(OutOfBlocks):
                    new = self._take(n, hit, steps)
            finally:
                self._tree.unlock(source)
        if not new:
            return self._allocate(n, hit, steps), 0
        try:
            self._partial.copy(source, new[0], tokens)
        except BaseException:
            self.tiers.pools[DEVICE].free(new)
            raise
        return new, tokens

    def _allocate(self, n: int, following: Sequence[int], steps: float | None) -> list[int]:
        """Allocate blocks. For a request, backups that have not started are given up where they lock what has to go."""
        try:
            return self._take(n, following, steps)
        except OutOfBlocks:
            if steps is not None or not sum(map(self.tiers.cancel, self.tiers.transfers.pending(Direction.OFFLOAD))):
                raise
        return self._take(n, following, steps)

    def _take(self, n: int, following: Sequence[int], steps: float | None) -> list[int]:
        after = following[-1] if following else None
        if steps is None:
            return self.tiers.allocate(DEVICE, n, after)

        def may_go(victim: TreeNode) -> bool:
            return not victim.wanted and may_replace(victim, steps, self.tiers.settings.unlabelled_step)

        return self.tiers.allocate(DEVICE, n, after, may_go)

    def _full_tokens(self, held: Holding, exact_tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the `exact_tokens` that fill whole blocks. Raises `PlanError` if they do not fit the lease."""
        count = len(exact_tokens)
        if count > len(held.lease.blocks) * self.block_size:
            raise PlanError("exact_tokens", count, f"the lease has {len(held.lease.blocks)} blocks")
        full = tuple(exact_tokens[: count - count % self.block_size])
        if full[: len(held.shared)] != held.shared[: len(full)]:
            raise PlanError("exact_tokens", held.lease.request_id, "differ from the tokens the lease reads")
        return full

    def _insert(self, held: Holding, tokens: tuple[int, ...]) -> TreeNode:
        """Put the blocks of a lease's first tokens into the tree. Returns the node of their end."""
        blocks = held.lease.blocks[: len(tokens) // self.block_size]
        node, adopted = self._tree.insert(held.namespace, tokens, blocks)
        held.own.difference_update(adopted)
        return node

    def _share(self, held: Holding, full: tuple[int, ...]) -> TreeNode:
        """Put the full blocks of a lease into the tree, and back up what is hit often. Returns their last node."""
        node = self._insert(held, full)
        self._back_up_hits(node)
        return node

    def _end(self, held: Holding) -> None:
        del self._held[held.lease.request_id]
        self._tree.unlock(held.node)
        self.tiers.pools[DEVICE].free(held.own)
        self.prefetcher.due = True

    def _count_hit(self, node: TreeNode, copied: int) -> tuple[Span, ...]:
        """Count a hit of `node` and its ancestors. Returns their tokens by source, and the `copied` ones behind."""
        parts: list[tuple[Source, int]] = []
        for step in node.path_down():
            source, tokens = Source.DEVICE, step.size * self.block_size
            if step.arrival and step.arrival.demanded:
                source = Source.HOST
                self.tiers.counters["host_hit_tokens"] += tokens
            elif step.arrival:
                self.tiers.counters["prefetched_hit_tokens"] += tokens
            parts.append((source, tokens))
            self.tiers.hit(step)
        self._back_up_hits(node)
        spans, stop = list[Span](), 0
        for source, some in groupby((*parts, (Source.DEVICE, copied)), itemgetter(0)):
            start, stop = stop, stop + sum(tokens for _, tokens in some)
            spans.append(Span(start, stop, source))
        return tuple(span for span in spans if span)

    def _back_up_hits(self, node: TreeNode) -> None:
        """Back up the nodes up to `node` that were hit often enough; fixed prompts are when they are labelled."""
        hits = self.tiers.settings.backup_hits
        if hits is None or not self.tiers.host_blocks:
            return
        often = next((step for step in node.path() if step.hits >= hits), None)
        if often is not None and often.parent is not None and not often.blocks[HOST]:
            self.tiers.back_up(often)

    # prefetches -----------------------------------------------------------------------------------------------

    def _lacking(self, key: Owner) -> int:
        """Return how many blocks a prefetch for a key would load: 0 unless its label is on the host and not moving."""
        node = self._tree.labels.nodes.get(key)
        if node is None or node.blocks[DEVICE] or node.transfer:
            return 0
        blocks = sum(one.size for one in missing(node))
        # A request waits that had better compute its prompt where that takes less time: nothing hides the load.
        return blocks if not is_awaited(self._owners.step(key)) or self.tiers.load_pays(blocks) else 0

    def _prefetch(self, key: Owner, may_evict: Callable[[StepView], bool]) -> None:
        node = self._tree.labels.nodes[key]
        self.tiers.load(node, Purpose.PREFETCH, lambda victim: not victim.wanted and may_evict(victim))
