"""One owner for every block: free, cached in the tree, in flight between the tiers, or leased to a request.

| block of a lease    | owner | read by  | at `finish`                                       |
|---------------------|-------|----------|---------------------------------------------------|
| exact hit           | tree  | anybody  | stays cached, its lock goes                       |
| committed           | tree  | anybody  | stays cached, its lock goes                       |
| exact and full      | lease | its own  | enters the tree; freed if the tree has the same   |
| translated, partial | lease | its own  | freed; never in the tree                          |

A lease never holds a block that is still loading. A scheduler asks `demand` for what is on the host, lets others go
first while it loads, and admits (which looks again, then locks) once there is nothing to wait for; or at any time,
and then the rest is recomputed. Without a host tier and without labels this is a plain prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kedge.cache.copies import Copier, Direction
from kedge.cache.counters import CacheStats, Reason
from kedge.cache.demands import Demands, Readiness, Status
from kedge.cache.node import DEVICE, HOST, LabelKey, Node, Tier
from kedge.cache.prefetch import Prefetcher, may_replace
from kedge.cache.radix_tree import Inserted
from kedge.cache.tiers import Tiers
from kedge.errors import ConfigError, OutOfBlocks, PlanError
from kedge.policies.eviction import EvictionPolicy, Namespace, lru
from kedge.settings import TierSettings
from kedge.types import RequestId, Source, Span, TenantId

Changes = Mapping[Any, tuple[float, float] | None]
"""Label -> (steps-to-execution, `inf` where unknown; probability), or None: nothing is known of it any more."""


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
    spans: tuple[Span, ...] = ()
    """The exact tokens by source: `HOST` where a request had to wait for their load, else `DEVICE`."""


@dataclass(slots=True)
class _Holding:
    """A lease's inside: `node` is locked and ends `shared`, its tokens in the tree; `own` blocks belong to it."""

    lease: Lease
    namespace: Namespace
    node: Node
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
    ) -> None:
        """`block_size` in tokens, `block_bytes` of KV in one block. Raises `ConfigError` for sizes below one, or a host
        tier without a copier.
        """
        if block_size < 1:
            raise ConfigError("block_size", block_size, "a block holds at least one token")
        if block_bytes < 1:
            raise ConfigError("block_bytes", block_bytes, "a block has at least one byte")
        if num_blocks < 1:
            raise ConfigError("num_blocks", num_blocks, "the device tier needs at least one block")
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._tiers = Tiers(num_blocks, block_size, policy, tiers or TierSettings(), copier, self._lost, block_bytes)
        self._tree = self._tiers.tree
        self._demands = Demands(self._tiers)
        self._prefetcher = Prefetcher(self._tiers, self._probability)
        self._held: dict[RequestId, _Holding] = {}
        self._next_runs: dict[LabelKey, tuple[float, float]] = {}

    # requests -------------------------------------------------------------------------------------------------

    def match(self, namespace: Namespace, tokens: Sequence[int]) -> Hit:
        """The longest exact prefix of `tokens` on the device. A pure look-up: nothing is locked or more recent."""
        blocks = self._tree.match(namespace, tokens)
        return Hit(tuple(blocks), len(blocks) * self.block_size)

    def status(self, namespace: Namespace, tokens: Sequence[int]) -> Status:
        """Where the longest exact prefix of `tokens` is, in both tiers. A pure look-up."""
        return self._demands.status(namespace, tokens)

    def demand(self, request_id: RequestId, namespace: Namespace, tokens: Sequence[int]) -> Readiness:
        """Loads what is on the host of the longest exact prefix of `tokens`, or joins the loads that are under way.

        To be asked in every step until it answers `READY` and the request is admitted, or the caller has waited long
        enough and admits it all the same; a shorter prefix loads a part. `LOADABLE`: there is no room now, which
        is tried again with every `pump`, before anything is prefetched. `READY` is also the answer where a copy has
        failed, or computing costs less than loading.
        """
        readiness = self._demands.demand(request_id, namespace, tokens)
        self._tiers.transfers.start()
        return readiness

    def withdraw(self, request_id: RequestId) -> None:
        """The request will not be admitted: whatever it demanded, it does not wait any more."""
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
        """Leases blocks for `total_tokens`: the exact prefix, at most `exact_limit` tokens of it, and new blocks.

        With `steps` nobody waits for it yet, and only what is needed later than so many steps ahead is evicted for it.
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
            new = self._allocate(self._blocks_for(total_tokens) - len(hit), hit, Reason.ADMIT, steps)
        except OutOfBlocks:
            self._tree.unlock(node)
            raise
        self._demands.withdraw(request_id)
        self._tree.touch(node)
        exact = len(hit) * self.block_size
        if exact_limit > 0:
            self._tiers.counters.lookup(exact, len(tokens) - exact)
        lease = Lease(request_id, (*hit, *new), exact, self._hit_path(node))
        self._held[request_id] = _Holding(lease, namespace, node, tuple(reusable[:exact]), set(new))
        return lease

    def extend(self, request_id: RequestId, total_tokens: int, steps: float | None = None) -> Lease:
        """Grows a lease to `total_tokens`; new blocks follow the old ones. No change if it is that long already.

        `steps` as for `admit`. Raises `OutOfBlocks`, having changed nothing, or `PlanError` without a lease.
        """
        held = self._holding(request_id)
        missing = self._blocks_for(total_tokens) - len(held.lease.blocks)
        if missing > 0:
            new = self._allocate(missing, held.lease.blocks, Reason.EXTEND, steps)
            held.own.update(new)
            held.lease = replace(held.lease, blocks=(*held.lease.blocks, *new))
        return held.lease

    def hand_over(self, request_id: RequestId, heir: RequestId) -> Lease:
        """The lease belongs to `heir` from now on, which demands nothing more. Raises `PlanError` without a lease, or
        where the heir holds one.
        """
        if heir in self._held:
            raise PlanError("request_id", heir, "holds a lease already")
        held = self._holding(request_id)
        self._demands.withdraw(heir)
        held.lease = replace(held.lease, request_id=heir)
        self._held[heir] = self._held.pop(request_id)
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

    # the workflow ---------------------------------------------------------------------------------------------

    def on_label(self, namespace: Namespace, key: LabelKey, tokens: Sequence[int]) -> int:
        """The fixed part of the prompt of `key` is `tokens`: labels the end of what is cached of it, floored to a
        block, and backs it up. A key has one label: the newest. Returns how many tokens it covers.

        To be called once the prompt is cached (after `commit_prefix` or `finish`), at every call of the agent. A key
        that no forecast knows gets no label, only the backup: whoever called once may call again. That is counted, as
        is a key of whose prompt nothing is cached.
        """
        next_run = self._next_runs.get(key)
        node = self._tree.end(namespace, tokens)
        if node is None or next_run is None:
            self._tiers.counters.ignored_labels += 1
            if node:
                self._tiers.back_up(node)
            return 0
        self._tree.labels.put(key, node, next_run[0])
        self._tiers.back_up(node)
        self._prefetcher.consider(node)
        return sum(step.size for step in node.path()) * self.block_size

    def on_forecast(self, changes: Changes) -> None:
        """Takes what has changed in the forecast. Costs by the changed keys and the depth of their labels."""
        for key, next_run in changes.items():
            if next_run is None:
                self._next_runs.pop(key, None)
                self._tree.labels.drop(key)
            else:
                self._next_runs[key] = next_run
                if node := self._tree.labels.move(key, next_run[0]):
                    self._prefetcher.consider(node)
        self._prefetcher.due = True
        self._prefetcher.cancel_outside()

    def pump(self) -> bool:
        """Lands what has been copied, tries denied demands again, prefetches, and hands new copies to the copier.
        Whether any copy has ended.

        To be called in every step, whatever the queue, and from time to time while nothing runs but copies do.
        """
        ended = self._tiers.drain()
        self._prefetcher.due |= bool(ended)
        if not self._demands.retry():
            self._prefetcher.start()
        self._tiers.transfers.start()
        return bool(ended)

    @property
    def starved(self) -> bool:
        """Whether a demanded load finds no room on the device."""
        return self._demands.denied

    @property
    def transferring(self) -> bool:
        """Whether a copy is queued or under way: blocks may come free without any request ending."""
        return bool(self._tiers.pending())

    def observe_compute(self, tokens: int, seconds: float) -> None:
        """A prefill of `tokens` took `seconds`: what a load has to beat."""
        self._tiers.cost.compute.observe(tokens, seconds)

    def limit_host(self, tenant: TenantId, nbytes: int | None) -> None:
        """How much of the host tier a tenant may have, from its next copy on: whole blocks; None is no limit.

        Its own copies go for its new ones, and never anybody else's because of it.
        """
        if nbytes is None:
            self._tiers.host_limits.pop(tenant, None)
        else:
            self._tiers.host_limits[tenant] = nbytes // self._tiers.block_bytes

    # upkeep ---------------------------------------------------------------------------------------------------

    def clear(self, namespace: Namespace) -> int:
        """Forgets what no lease and no copy under way holds in `namespace`; returns how many blocks of both tiers
        that freed.
        """
        return self._tiers.clear(namespace)

    def clear_all(self) -> int:
        """`clear` for every namespace."""
        return sum(self.clear(namespace) for namespace in self._tree.namespaces())

    def reorder(self) -> None:
        """To be called when the policy's answers have changed for a reason that `on_forecast` does not tell."""
        self._tree.reorder()

    def stats(self) -> CacheStats:
        """A snapshot."""
        tiers, counters, block_bytes = self._tiers, self._tiers.counters, self._tiers.block_bytes
        device, host = (tiers.pools[tier].num_free for tier in Tier)
        cached, host_cached = (tiers.tree.shares[tier].size for tier in Tier)
        loading, offloading = (len(tiers.in_flight(way)) for way in (Direction.LOAD, Direction.OFFLOAD))
        return CacheStats(
            **counters.totals(),
            bytes_loaded=counters.blocks_loaded * block_bytes,
            bytes_offloaded=counters.blocks_offloaded * block_bytes,
            free_blocks=device,
            cached_blocks=cached,
            leased_blocks=self.num_blocks - device - cached - loading,
            loading_blocks=loading,
            host_free_blocks=host,
            host_cached_blocks=host_cached,
            offloading_blocks=offloading,
        )

    def check_integrity(self) -> None:
        """Raises `PlanError` unless every block of both tiers has exactly one owner, locks are those of leases and
        transfers, every state is legal and priorities and queues are what a naive look gives.
        """
        holdings = self._held.values()
        leased = [block for held in holdings for block in held.own]
        self._tiers.check_integrity(leased, [held.node for held in holdings])
        self._demands.check_integrity()
        cached = {block for node in self._tree.nodes() for block in node.blocks[DEVICE]}
        for held in holdings:
            self._check_lease(held, cached)

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

    def _allocate(self, n: int, following: Sequence[int], reason: Reason, steps: float | None) -> list[int]:
        after = following[-1] if following else None
        if steps is None:
            return self._tiers.allocate(DEVICE, n, reason, after)

        def may_go(victim: Node) -> bool:
            return not victim.wanted and may_replace(victim, steps, self._tiers.settings.virtual_step)

        return self._tiers.allocate(DEVICE, n, Reason.AHEAD, after, may_go)

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
        self._back_up_hits(inserted.node)
        return inserted

    def _end(self, held: _Holding) -> None:
        del self._held[held.lease.request_id]
        self._tree.unlock(held.node)
        self._tiers.pools[DEVICE].free(held.own)
        self._prefetcher.due = True

    def _hit_path(self, node: Node) -> tuple[Span, ...]:
        """Counts a hit of `node` and all above it; their tokens by source."""
        spans: list[Span] = []
        for step in node.path_down():
            source = self._source(step)
            start = spans[-1].stop if spans else 0
            stop = start + step.size * self.block_size
            if spans and spans[-1].source is source:
                start = spans.pop().start
            spans.append(Span(start, stop, source))
            self._tiers.hit(step)
        self._back_up_hits(node)
        return tuple(spans)

    def _source(self, node: Node) -> Source:
        """Where a request that hits `node` has its KV from; counts it."""
        tokens = node.size * self.block_size
        if node.arrival is None:
            return Source.DEVICE
        if node.arrival.demanded:
            self._tiers.counters.host_hit_tokens += tokens
            return Source.HOST
        self._tiers.counters.prefetched_hit_tokens += tokens
        return Source.DEVICE

    def _back_up_hits(self, node: Node) -> None:
        """Backs up what of the path to `node` has been hit often enough; fixed prompts are when they are labelled."""
        hits = self._tiers.settings.backup_hits
        if hits is None or not self._tiers.host_blocks:
            return
        often = next((step for step in node.path() if step.hits >= hits), None)
        if often is not None and often.parent is not None and not often.blocks[HOST]:
            self._tiers.back_up(often)

    def _lost(self, node: Node) -> None:
        self._prefetcher.consider(node)

    def _probability(self, node: Node) -> float:
        """How likely it is that one of the agents whose fixed prompt ends at `node` needs it as soon as its step."""
        likely = (self._next_runs[key][1] for key, step in node.labels.items() if step == node.step)
        return max(likely, default=1.0)
