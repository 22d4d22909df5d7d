import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kedge.cache import CacheManager
from kedge.errors import ConfigError, OutOfBlocks, PlanError
from kedge.policies.eviction import EvictionPolicy, lru, steps_to_execution
from kedge.settings import TierSettings
from kedge.types import Namespace, RequestId

NS, OTHER = Namespace("tenant"), Namespace("other")
A, B = "a", "b"


def serve(cache: CacheManager, text: str, exact: int | None = None) -> int:
    """One request from admission to finish; returns how many of its tokens were exact hits."""
    tokens = text.encode()
    lease = cache.admit(A, NS, tokens, len(tokens) - 1, len(tokens))
    cache.finish(A, tokens[:exact])
    cache.check_integrity()
    return lease.exact_tokens


def test_new_blocks_follow_the_hit() -> None:
    cache = CacheManager(16, block_size=1)
    serve(cache, "abc")
    assert cache.admit(A, NS, b"abcdef", 5, 6).blocks == (0, 1, 2, 3, 4, 5)
    assert cache.extend(A, 8).blocks == (0, 1, 2, 3, 4, 5, 6, 7)
    assert cache.extend(A, 3).blocks == (0, 1, 2, 3, 4, 5, 6, 7), "a lease never shrinks"


def test_stats_count_admissions_that_could_reuse() -> None:
    cache = CacheManager(16, block_size=2)
    serve(cache, "abcdef")
    serve(cache, "abcdeX")
    cache.admit(A, NS, b"abcdef", 0, 6)
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.hit_tokens, stats.missed_tokens) == (1, 1, 4, 8)


def test_misuse_is_refused() -> None:
    cache = CacheManager(8, block_size=1)
    serve(cache, "ab")
    cache.admit(A, NS, b"abc", 2, 4)
    with pytest.raises(PlanError, match="holds a lease already"):
        cache.admit(A, NS, b"abc", 2, 4)
    with pytest.raises(PlanError, match="differ from the tokens the lease reads"):
        cache.finish(A, b"aXc")
    with pytest.raises(PlanError, match="the lease has 4 blocks"):
        cache.commit_prefix(A, b"abcde")
    with pytest.raises(PlanError, match="total_tokens=1"):
        cache.admit(B, NS, b"abc", 2, 1)
    for call in (cache.abort, lambda request: cache.finish(request, b""), lambda request: cache.extend(request, 1)):
        with pytest.raises(PlanError, match="holds no lease"):
            call(B)
    cache.check_integrity()
    with pytest.raises(ConfigError, match="block_size=0"):
        CacheManager(8, block_size=0)
    with pytest.raises(ConfigError, match="num_blocks=0"):
        CacheManager(0)
    with pytest.raises(ConfigError, match="block_bytes=0"):
        CacheManager(4, block_bytes=0)
    with pytest.raises(ConfigError, match="host_blocks=4"):
        CacheManager(4, tiers=TierSettings(host_memory="4 blocks"))


Prefix = tuple[Namespace, bytes]
NAMES = st.sampled_from([Namespace("t"), Namespace("u")])
TEXTS = st.text("ab", min_size=1, max_size=12).map(str.encode)


class Twin:
    """The same cache, written naively: a dict of block-aligned prefixes with the time of their last use."""

    def __init__(self, blocks: int, size: int) -> None:
        self.blocks, self.size, self.clock = blocks, size, 0
        self.used: dict[Prefix, int] = {}
        self.leases: dict[RequestId, dict] = {}

    def prefixes(self, name: Namespace, tokens: bytes) -> list[Prefix]:
        return [(name, tokens[:stop]) for stop in range(self.size, len(tokens) + 1, self.size)]

    def match(self, name: Namespace, tokens: bytes) -> int:
        return self.size * sum(prefix in self.used for prefix in self.prefixes(name, tokens))

    def touch(self, name: Namespace, tokens: bytes) -> None:
        self.clock += 1
        self.used.update(dict.fromkeys(self.prefixes(name, tokens), self.clock))

    def locked(self) -> set[Prefix]:
        return {prefix for lease in self.leases.values() for prefix in self.prefixes(lease["name"], lease["shared"])}

    def make_room(self, n: int, locked: set[Prefix]) -> bool:
        free = self.blocks - len(self.used) - sum(lease["own"] for lease in self.leases.values())
        if n - free > len(self.used.keys() - locked):
            return False
        for _ in range(n - free):
            inner = {(name, text[: -self.size]) for name, text in self.used}
            del self.used[min(self.used.keys() - locked - inner, key=self.used.__getitem__)]
        return True

    def admit(self, request: RequestId, name: Namespace, tokens: bytes, limit: int, total: int) -> bool:
        shared = tokens[: self.match(name, tokens[:limit])]
        own = -(-total // self.size) - len(shared) // self.size
        if not self.make_room(own, self.locked() | set(self.prefixes(name, shared))):
            return False
        self.touch(name, shared)
        self.leases[request] = {"name": name, "tokens": tokens, "shared": shared, "own": own, "total": total}
        return True

    def extend(self, request: RequestId, total: int) -> bool:
        lease = self.leases[request]
        more = max(0, -(-total // self.size) - -(-lease["total"] // self.size))
        if not self.make_room(more, self.locked()):
            return False
        lease["own"] += more
        lease["total"] = max(total, lease["total"])
        return True

    def enter(self, request: RequestId, tokens: bytes) -> None:
        lease, known = self.leases[request], len(self.used)
        if len(tokens) >= self.size:
            self.touch(lease["name"], tokens)
        lease["own"] -= len(self.used) - known


class CacheComparison(RuleBasedStateMachine):
    """Without a host tier and without hints: least recently used first, to the letter, by steps too."""

    @initialize(size=st.sampled_from([1, 3]), policy=st.sampled_from([lru, steps_to_execution()]))
    def begin(self, size: int, policy: EvictionPolicy) -> None:
        self.size, self.seen, self.count = size, set[Prefix](), 0
        self.cache, self.twin = CacheManager(14, size, policy), Twin(14, size)

    @rule(name=NAMES, tokens=TEXTS, limit=st.integers(0, 12), more=st.integers(0, 4))
    def admit(self, name: Namespace, tokens: bytes, limit: int, more: int) -> None:
        self.count += 1
        request = f"r{self.count}"
        if self.twin.admit(request, name, tokens, limit, len(tokens) + more):
            lease = self.cache.admit(request, name, tokens, limit, len(tokens) + more)
            assert lease.exact_tokens == len(self.twin.leases[request]["shared"])
            shared = self.cache.match(name, tokens[: lease.exact_tokens])
            assert list(lease.blocks[: lease.exact_tokens // self.size]) == shared
        else:
            with pytest.raises(OutOfBlocks):
                self.cache.admit(request, name, tokens, limit, len(tokens) + more)

    @precondition(lambda self: self.twin.leases)
    @rule(data=st.data(), more=st.integers(0, 5))
    def extend(self, data: st.DataObject, more: int) -> None:
        request = data.draw(st.sampled_from(sorted(self.twin.leases)))
        total = self.twin.leases[request]["total"] + more
        if self.twin.extend(request, total):
            assert len(self.cache.extend(request, total).blocks) == -(-total // self.size)
        else:
            with pytest.raises(OutOfBlocks):
                self.cache.extend(request, total)

    @precondition(lambda self: self.twin.leases)
    @rule(data=st.data(), exact=st.integers(0, 14))
    def commit(self, data: st.DataObject, exact: int) -> None:
        request = data.draw(st.sampled_from(sorted(self.twin.leases)))
        lease = self.twin.leases[request]
        tokens = lease["tokens"][: exact - exact % self.size]
        tokens = tokens[: len(tokens) - len(tokens) % self.size]
        self.cache.commit_prefix(request, tokens)
        if len(tokens) > len(lease["shared"]):
            self.twin.enter(request, tokens)
            lease["shared"] = tokens

    @precondition(lambda self: self.twin.leases)
    @rule(data=st.data(), exact=st.integers(0, 20))
    def finish(self, data: st.DataObject, exact: int) -> None:
        request = data.draw(st.sampled_from(sorted(self.twin.leases)))
        lease = self.twin.leases[request]
        tokens = (lease["tokens"] + b"c" * 99)[: lease["total"]][:exact]
        self.cache.finish(request, tokens)
        self.twin.enter(request, tokens)
        del self.twin.leases[request]

    @precondition(lambda self: self.twin.leases)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.twin.leases)))
        self.cache.abort(request)
        del self.twin.leases[request]

    @rule()
    def clear(self) -> None:
        gone = self.twin.used.keys() - self.twin.locked()
        assert self.cache.clear() == len(gone)
        for prefix in gone:
            del self.twin.used[prefix]

    @invariant()
    def same(self) -> None:
        self.cache.check_integrity()
        self.seen |= self.twin.used.keys()
        for name, tokens in self.seen:
            assert self.size * len(self.cache.match(name, tokens)) == self.twin.match(name, tokens)
        stats = self.cache.stats()
        assert stats.cached_blocks == len(self.twin.used)
        assert stats.leased_blocks == sum(lease["own"] for lease in self.twin.leases.values())


CacheComparison.TestCase.settings = settings(max_examples=140, stateful_step_count=30, deadline=None)
TestAgainstTheTwin = CacheComparison.TestCase
