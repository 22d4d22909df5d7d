"""One owner for every block: free, cached in the tree, in flight between the tiers, or leased (see `leases`).

A lease never holds a block that is still loading. A scheduler asks `demand` for what is on the host, lets others go
first while it loads, and admits (which looks again, then locks) once there is nothing to wait for; or at any time,
and then the rest is recomputed. Without a host tier and without labels this is a plain prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kedge.cache.copies import BlockFiles, Copier, CopyBeginning, Direction
from kedge.cache.counters import CacheStats
from kedge.cache.demands import Demands, Readiness, Status
from kedge.cache.leases import Lease, Leases
from kedge.cache.node import LabelKey, Tier, TreeNode
from kedge.cache.prefetch import Prefetcher
from kedge.cache.tiers import Tiers
from kedge.errors import ConfigError
from kedge.policies.eviction import EvictionPolicy, lru
from kedge.settings import TierSettings
from kedge.types import Namespace, RequestId, TenantId

Changes = Mapping[Any, tuple[float, float] | None]
"""Label -> (steps-to-execution, `inf` where unknown; probability), or None: nothing is known of it any more."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest exact prefix on the device by whole blocks: `tokens_count` tokens in `blocks`."""

    blocks: tuple[int, ...]
    tokens_count: int


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
        files: BlockFiles | None = None,
        copy_beginning: CopyBeginning | None = None,
    ) -> None:
        """Begin with an empty cache; `block_size` is in tokens, `block_bytes` the size of one block's KV. What `files`
        have on the disk is known from the start. Without `copy_beginning` only whole blocks are reused. Raises
        `ConfigError` for sizes below one, or a host tier without a copier.
        """
        sizes = {"block_size": block_size, "block_bytes": block_bytes, "num_blocks": num_blocks}
        for name, size in sizes.items():
            if size < 1:
                raise ConfigError(name, size, "must be at least 1")
        self.block_size, self.num_blocks = block_size, num_blocks

        def lost(node: TreeNode) -> None:
            self._prefetcher.consider(node)

        self.tiers = Tiers(num_blocks, block_size, policy, tiers or TierSettings(), copier, lost, block_bytes, files)
        self._tree = self.tiers.tree
        self._demands = Demands(self.tiers)
        self._prefetcher = Prefetcher(self.tiers, self._probability)
        self._leases = Leases(self.tiers, copy_beginning)
        self._next_runs: dict[LabelKey, tuple[float, float]] = {}

    # requests -------------------------------------------------------------------------------------------------

    def match(self, namespace: Namespace, tokens: Sequence[int]) -> Hit:
        """Return the longest exact prefix of `tokens` on the device. A pure look-up: nothing is locked or touched."""
        blocks = self._tree.match(namespace, tokens)
        return Hit(tuple(blocks), len(blocks) * self.block_size)

    def status(self, namespace: Namespace, tokens: Sequence[int]) -> Status:
        """Return where the longest exact prefix of `tokens` is, in both tiers. A pure look-up."""
        return self._demands.status(namespace, tokens)

    def demand(self, request_id: RequestId, namespace: Namespace, tokens: Sequence[int]) -> Readiness:
        """Load what is on the host of the longest exact prefix of `tokens`, or join the loads that are under way.

        Call this in every step until it answers `READY` and the request is admitted, or until the caller has waited
        long enough and admits it all the same; a shorter prefix loads a part. `LOADABLE`: there is no room now, which
        is tried again with every `pump`, before anything is prefetched. `READY` is also the answer where a copy has
        failed, or computing costs less than loading.
        """
        readiness = self._demands.demand(request_id, namespace, tokens)
        self.tiers.transfers.start()
        return readiness

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
        lease = self._leases.admit(request_id, namespace, tokens, exact_limit, total_tokens, steps)
        self._demands.withdraw(request_id)
        return lease

    def extend(self, request_id: RequestId, total_tokens: int, steps: float | None = None) -> Lease:
        """Grow a lease to `total_tokens`; new blocks follow the old ones. No change if it is that long already. `steps`
        as for `admit`. Raises `OutOfBlocks`, having changed nothing, or `PlanError` without a lease.
        """
        return self._leases.extend(request_id, total_tokens, steps)

    def hand_over(self, request_id: RequestId, heir: RequestId) -> Lease:
        """Give a lease to the request `heir`, which demands nothing more. Raises `PlanError` without a lease, or where
        the heir holds one.
        """
        lease = self._leases.hand_over(request_id, heir)
        self._demands.withdraw(heir)
        return lease

    def borrow(self, request_id: RequestId, other: RequestId, places: Sequence[int]) -> Lease:
        """Let a lease hold these blocks of another one, in place of its own at the same places, which are freed.

        Neither may write to them any more, nor share them by the tree; they are freed with the last lease that holds
        them. Raises `PlanError`, having changed nothing, without both leases, or for a block that is cached.
        """
        return self._leases.borrow(request_id, other, places)

    def commit_prefix(self, request_id: RequestId, exact_tokens: Sequence[int]) -> None:
        """Share the first `len(exact_tokens)` tokens of a running lease, whose KV is final and exact (full blocks).

        The lease keeps its blocks, also those that the tree holds twice: these are freed when it ends. Raises
        `PlanError` without a lease, or where `exact_tokens` does not fit it.
        """
        self._leases.commit_prefix(request_id, exact_tokens)

    def finish(self, request_id: RequestId, exact_tokens: Sequence[int], fixed: int = 0) -> None:
        """End a lease. Its first `len(exact_tokens)` tokens are exact, identical to dense prefill, and enter the tree
        by full blocks, and the beginning of the block in which the first `fixed` of them end. All others are freed.

        Raises `PlanError` without a lease, or where `exact_tokens` does not fit it.
        """
        self._leases.finish(request_id, exact_tokens, fixed)
        self._prefetcher.due = True

    def abort(self, request_id: RequestId) -> None:
        """End a lease; what it had not committed is freed. Raises `PlanError` without a lease."""
        self._leases.abort(request_id)
        self._prefetcher.due = True

    # the workflow ---------------------------------------------------------------------------------------------

    def on_label(self, namespace: Namespace, key: LabelKey, tokens: Sequence[int], backed_up: bool = True) -> int:
        """Label the end of what is cached of `tokens`, the fixed prompt or the history of `key`, and back it up.

        The end is floored to a block. A key has one label: the newest. Returns how many tokens it covers. Call this
        once the prompt is cached (after `commit_prefix` or `finish`), at every call of the agent. A key that no
        forecast knows gets the backup and no label, which is counted, as is a prompt of which nothing is cached.
        """
        next_run = self._next_runs.get(key)
        node = self._tree.end(namespace, tokens)
        if node is None or next_run is None:
            self.tiers.counters.ignored_labels += 1
        else:
            self._tree.labels.put(key, node, next_run[0])
            self._tree.offer(*self._tree.index.join_path(node))
        if node and backed_up:
            self.tiers.backups.back_up(node)
        if node is None or next_run is None:
            return 0
        self._prefetcher.consider(node)
        return sum(step.size for step in node.path()) * self.block_size

    def on_forecast(self, changes: Changes) -> None:
        """Take the changes of the forecast. O(changed keys x depth of their labels)."""
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
        """Land what has been copied, try denied demands again, prefetch, and hand new copies to the copier.

        Returns whether any copy has ended. Call this in every step, whatever the queue, and from time to time while
        nothing runs but copies do.
        """
        ended = self.tiers.land()
        self._prefetcher.due |= ended
        if not self._demands.retry():
            self._prefetcher.start()
        self.tiers.transfers.start()
        return ended

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
        return self.tiers.busy

    def observe_compute(self, tokens: int, seconds: float) -> None:
        """Learn from a prefill of `tokens` that took `seconds`, which a load has to beat."""
        self.tiers.cost.compute.observe(tokens, seconds)

    def limit_host(self, tenant: TenantId, nbytes: int | None) -> None:
        """Limit the host bytes of a tenant from its next copy on, in whole blocks; None is no limit.

        A tenant at its limit evicts its own copies, and never those of others.
        """
        if nbytes is None:
            self.tiers.backups.limits.pop(tenant, None)
        else:
            self.tiers.backups.limits[tenant] = nbytes // self.tiers.block_bytes

    def set_policy(self, policy: EvictionPolicy) -> EvictionPolicy:
        """Evict from now on by `policy`, in both tiers; returns the one before. O(n log n) in the tree's nodes."""
        before, self._tree.policy = self._tree.policy, policy
        self._tree.offer(*self._tree.nodes())
        return before

    # upkeep ---------------------------------------------------------------------------------------------------

    def clear(self, namespace: Namespace | None = None) -> int:
        """Forget what no lease and no copy holds, on disk too; None is all namespaces. Returns how many blocks went."""
        spaces = self.tiers.namespaces() if namespace is None else {namespace}
        return sum(self.tiers.clear(space) for space in spaces)

    def stats(self) -> CacheStats:
        """Return a snapshot of the figures."""
        tiers, counters, block_bytes = self.tiers, self.tiers.counters, self.tiers.block_bytes
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
            **(tiers.disk.stats() if tiers.disk else {}),
        )

    def check_integrity(self) -> None:
        """Raise `PlanError` unless every block of both tiers has exactly one owner, locks are those of leases and
        transfers, every state is legal and priorities and queues are what a naive look gives.
        """
        holdings = self._leases.holdings()
        leased = set[int]().union(*(held.own for held in holdings))
        self.tiers.check_integrity([*leased], [held.node for held in holdings])
        self._demands.check_integrity()
        self._leases.check_integrity()

    def _probability(self, node: TreeNode) -> float:
        """Return how likely an agent whose fixed prompt ends at `node` needs it as soon as the node's step says."""
        likely = (self._next_runs[key][1] for key, step in node.labels.items() if step == node.step)
        return max(likely, default=1.0)
