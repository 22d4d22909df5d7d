"""A copier that tests hold in their hand, and a world of pretended KV in which every block says what is in it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kedge.cache import CacheManager, Copied, Copy, Direction, Lease
from kedge.cache.node import State
from kedge.policies.eviction import EvictionPolicy, steps_to_execution
from kedge.policies.prefetch import PREFETCH_WINDOW
from kedge.settings import TierSettings
from kedge.types import Namespace, RequestId

NS = Namespace("tenant")


@dataclass
class FakeCopier:
    """Ends copies when told to, in any order, well or badly. Contents move when a copy ends; a bad one leaves dirt.

    Of each direction `jobs` begin, and as many in a hurry, which go before the others.
    """

    jobs: int = 2
    device: dict[int, Any] = field(default_factory=dict)
    host: dict[int, Any] = field(default_factory=dict)
    queued: list[Copy] = field(default_factory=list)
    submitted: list[Copy] = field(default_factory=list)
    """What has begun"""
    history: list[Copy] = field(default_factory=list)
    hurried: list[int] = field(default_factory=list)
    _ended: list[Copied] = field(default_factory=list)

    def submit(self, copy: Copy) -> None:
        self.queued.append(copy)
        self._begin()

    def hurry(self, copy_id: int) -> None:
        self.hurried.append(copy_id)
        self._begin()

    def cancel(self, copy_id: int) -> bool:
        before = len(self.queued)
        self.queued = [copy for copy in self.queued if copy.copy_id != copy_id]
        return len(self.queued) < before

    def drain(self) -> list[Copied]:
        ended, self._ended = self._ended, []
        if not ended:  # what ends is known before the next one begins
            self._begin()
        return ended

    def _begin(self) -> None:
        for copy in sorted(self.queued, key=lambda one: one.copy_id not in self.hurried):
            waits = copy.copy_id not in self.hurried
            ahead = [one for one in self.submitted if one.direction is copy.direction]
            if sum(waits or one.copy_id in self.hurried for one in ahead) < self.jobs:
                self.queued.remove(copy)
                self.submitted.append(copy)
                self.history.append(copy)

    def end(self, at: int = 0, ok: bool = True, seconds: float = 0.001) -> Copy:
        """Ends the copy at this place among the submitted ones."""
        copy = self.submitted.pop(at)
        to, source = (self.device, self.host) if copy.direction is Direction.LOAD else (self.host, self.device)
        for a, b in zip(copy.sources, copy.targets, strict=True):
            to[b] = source.get(a) if ok else (None, "dirt")
        self._ended.append(Copied(copy.copy_id, ok, seconds))
        return copy

    def end_all(self, ok: bool = True) -> None:
        while self.submitted:
            self.end(ok=ok)


class World:
    """A cache whose blocks hold what was written into them: the prompt up to their end, or as far as it was copied.
    Tokens are the characters of a text.
    """

    def __init__(
        self,
        num_blocks: int,
        host_blocks: int = 0,
        block_size: int = 1,
        policy: EvictionPolicy | None = None,
        block_bytes: int = 1,
        copy_jobs: int = 2,
        prefetch_window: float = PREFETCH_WINDOW,
        *,
        copies_beginnings: bool = False,
        on_host: Mapping[str, str] | None = None,
        **settings: object,
    ) -> None:
        self.copier, self.made = FakeCopier(copy_jobs), list[tuple[int, int, int]]()
        tiers = TierSettings(host_memory=f"{host_blocks} blocks", **settings)
        policy = policy or steps_to_execution()
        copy = self.copy_beginning if copies_beginnings else None
        self.cache = CacheManager(num_blocks, block_size, policy, tiers, self.copier, block_bytes, copy)
        self.cache.prefetcher.window = prefetch_window
        self.tree = self.cache._tree
        self.requests = 0
        if on_host:
            self._put_on_host(on_host)

    # requests -------------------------------------------------------------------------------------------------

    def admit(
        self,
        text: str,
        more: int = 0,
        request: RequestId | None = None,
        ns: Namespace = NS,
        limit: int | None = None,
        steps: float | None = None,
    ) -> Lease:
        """Admits a request that may reuse all of its text, and checks that what it hits is what it asked for."""
        request, tokens, size = request or self.new_request(), text.encode(), self.cache.block_size
        limit = len(tokens) if limit is None else limit
        lease = self.cache.admit(request, ns, tokens, limit, len(tokens) + more, steps)
        assert lease.exact_tokens <= max(0, limit)
        for start, block in zip(range(0, lease.exact_tokens, size), lease.blocks, strict=False):
            stop = min(start + size, lease.exact_tokens)
            whose, held = self.copier.device[block]
            assert (whose, held[:stop]) == (ns, text[:stop]), "another prompt's KV"
        assert sum(len(span) for span in lease.spans) == lease.exact_tokens
        self.compute(lease, text, ns)
        return lease

    def copy_beginning(self, source: int, target: int, tokens: int) -> None:
        self.made.append((source, target, tokens))
        ns, held = self.copier.device[source]
        start = (len(held) - 1) // self.cache.block_size * self.cache.block_size
        self.copier.device[target] = ns, held[: start + tokens]

    def compute(self, lease: Lease, text: str, ns: Namespace = NS) -> None:
        """Writes what the hit left out."""
        for i in range(lease.exact_tokens // self.cache.block_size, -(-len(text) // self.cache.block_size)):
            self.copier.device[lease.blocks[i]] = self.content(ns, text, i)

    def content(self, ns: Namespace, text: str, block: int) -> object:
        return ns, text[: (block + 1) * self.cache.block_size]

    def new_request(self) -> RequestId:
        self.requests += 1
        return f"r{self.requests}"

    def serve(self, text: str, key: object = None, fixed: int = 0, ns: Namespace = NS) -> int:
        """One request from admission to its end, labelled on the way; returns how many tokens were exact hits."""
        lease = self.admit(text, ns=ns)
        self.cache.commit_prefix(lease.request_id, text.encode())
        if key is not None:
            self.cache.on_label(ns, key, text[:fixed].encode())
        self.cache.finish(lease.request_id, text.encode())
        self.check()
        return lease.exact_tokens

    def _put_on_host(self, fixed: Mapping[str, str]) -> None:
        """Serves every agent's fixed prompt, until all are on the host only; everybody is far away."""
        self.forecast(**dict.fromkeys(fixed, 50.0))
        for agent, text in fixed.items():
            self.serve(text, agent, len(text))
            self.settle()
        self.evict(self.cache.stats().cached_blocks)
        assert not self.on_device(*fixed.values()) and self.cached(*fixed.values()) == list(fixed.values())

    # the workflow ---------------------------------------------------------------------------------------------

    def forecast(self, **steps: float | None) -> None:
        """What has changed: agents by name."""
        self.cache.on_forecast({key: None if step is None else (step, 1.0) for key, step in steps.items()})
        self.check()

    def settle(self, ok: bool = True) -> None:
        """Pumps and ends copies until nothing moves."""
        self.cache.pump()
        while self.copier.submitted or self.copier.queued:
            self.copier.end_all(ok)
            self.cache.pump()
        self.check()

    # looking --------------------------------------------------------------------------------------------------

    def on_device(self, *texts: str) -> list[str]:
        return [text for text in texts if self.tokens(text)[0] == len(text)]

    def cached(self, *texts: str) -> list[str]:
        """Those that one of the tiers holds whole."""
        return [text for text in texts if sum(self.tokens(text)) == len(text)]

    def tokens(self, text: str) -> tuple[int, int]:
        """How many tokens are on the device, and then on the host only."""
        status = self.cache.status(NS, text.encode())
        return status.device_tokens, status.host_tokens

    def demand(self, text: str, request: str = "waiting") -> str:
        answer = self.cache.demand(request, NS, text.encode())
        self.check()
        return answer.value

    def evict(self, blocks: int) -> None:
        """Makes room for a request that then never runs."""
        request = self.new_request()
        free = self.cache.stats().free_blocks
        self.cache.admit(request, NS, b"", 0, (free + blocks) * self.cache.block_size)
        self.cache.abort(request)
        self.check()

    def outcomes(self, purpose: str) -> dict[str, int]:
        return {name: count for name, count in self.cache.stats().transfers[purpose].items() if count}

    def check(self) -> None:
        """Check the cache, and that no load is queued whose ancestors are neither on the device nor on their way."""
        self.cache.check_integrity()
        for load in self.cache.tiers.transfers.pending(Direction.LOAD):
            assert load.copy not in self.copier.queued or load.nodes[0].above is not State.HOST
