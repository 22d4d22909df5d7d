"""Beginnings of cached blocks: whose they are, which is taken, what they cost others, and what they say."""

from collections.abc import Sequence
from typing import Any

import pytest

from kedge.cache import CacheManager, Lease
from kedge.policies.eviction import lru
from kedge.types import Source, Span
from tests.cache.helpers import NS, World

SIZE = 4
FIRST = "HEADerone"
"""A head of six tokens, `HEADer`, which fills one block and half of another, and a value"""


class Memory(World):
    """A cache with blocks of four tokens, whose beginnings are copied."""

    def __init__(self, num_blocks: int = 16, host_blocks: int = 0, **tiers: Any) -> None:
        super().__init__(num_blocks, host_blocks, SIZE, lru, copies_beginnings=True, **tiers)

    def request(self, text: str, limit: int | None = None, exact: int | None = None, fixed: int = 0) -> Lease:
        """Serve a request of which the first `exact` tokens are so: all, where none is translated."""
        lease = self.admit(text, limit=len(text) - 1 if limit is None else limit)
        self.cache.finish(lease.request_id, text[:exact].encode(), fixed)
        self.check()
        return lease

    def fill(self) -> None:
        """Evict all that no lease holds."""
        stats = self.cache.stats()
        blocks = stats.free_blocks + stats.cached_blocks
        self.cache.abort(self.admit("x" * blocks * SIZE, limit=0).request_id)

    def cached(self, text: str) -> int:
        return self.tokens(text)[0]


def exact(leases: Sequence[Lease]) -> list[int]:
    return [lease.exact_tokens for lease in leases]


# what is found --------------------------------------------------------------------------------------------------------


def test_a_head_that_ends_within_a_block_is_exact_from_the_second_prompt_on() -> None:
    memory = Memory()
    assert exact([memory.request(text) for text in (FIRST, "HEADertwo", "HEADerthree")]) == [0, 6, 7]
    stats = memory.cache.stats()
    assert (stats.hit_tokens, stats.copied_hit_tokens, stats.missed_tokens) == (13, 5, 9 + 3 + 4)
    assert memory.admit("HEADerfour").spans == (Span(0, 6, Source.DEVICE),)


def test_no_more_is_copied_than_may_be_reused() -> None:
    memory = Memory()
    memory.request(FIRST)
    assert exact([memory.request(FIRST, limit) for limit in (-1, 0, 1, 4, 5, 7, 8)]) == [0, 0, 1, 4, 5, 7, 8]
    assert memory.cache.stats().copied_hit_tokens == 1 + 1 + 3


def test_a_cache_that_cannot_copy_reuses_whole_blocks() -> None:
    cache = CacheManager(16, SIZE)
    for text, found in ((b"HEADerone", 0), (b"HEADertwo", 4)):
        assert cache.admit("a", NS, text, 8, 9).exact_tokens == found
        cache.finish("a", text[:6], 6)
    assert cache.stats().cached_blocks == 1


def test_the_longest_beginning_is_taken_and_of_equal_ones_the_one_used_last() -> None:
    memory = Memory(64)
    for text in ("HEADabcd", "HEADabxx", "HEADaxxx"):
        memory.request(text, 0)
    blocks = {text: memory.cache.match(NS, text.encode())[1] for text in ("HEADabcd", "HEADabxx", "HEADaxxx")}
    for text, source, tokens in (
        ("HEADabcz", "HEADabcd", 3), ("HEADabzz", "HEADabcd", 2), ("HEADazzz", "HEADabcd", 1),
        ("HEADabxz", "HEADabxx", 3), ("HEADabzz", "HEADabxx", 2), ("HEADaxxz", "HEADaxxx", 3),
        ("HEADazzz", "HEADaxxx", 1),
    ):  # fmt: skip
        memory.cache.abort(memory.admit(text).request_id)
        assert (memory.made[-1][0], memory.made[-1][2]) == (blocks[source], tokens)


def test_a_block_that_is_not_on_the_device_is_passed_over() -> None:
    memory = Memory(16, host_blocks=64, backup_hits=0)
    memory.request("HEADabxx")
    memory.request("HEADabcd")
    memory.settle()
    assert memory.cache.stats().host_cached_blocks == 3
    memory.fill()
    assert memory.cached("HEADabcd") == 0
    memory.request("HEADaxxx")
    lease = memory.admit("HEADabcz")
    assert lease.spans == (Span(0, 5, Source.DEVICE),), "the longer ones are on the host only"


# what is kept ---------------------------------------------------------------------------------------------------------


def test_a_fixed_prompt_is_exact_though_all_behind_it_is_translated_from_the_first_prompt_on() -> None:
    memory = Memory()
    leases = [memory.request(f"HEADer{value}", exact=6, fixed=6) for value in ("one", "two", "three")]
    assert exact(leases) == [0, 6, 6]
    stats = memory.cache.stats()
    assert (stats.cached_blocks, stats.leased_blocks) == (2, 0), "it is kept once"
    assert memory.cached("HEADerone") == 4


def test_a_fixed_prompt_that_fills_its_blocks_or_was_cut_short_keeps_no_more_than_it_has() -> None:
    memory = Memory()
    memory.request("HEADone", exact=4, fixed=4)
    memory.request("HEADerone", exact=3, fixed=6)
    assert memory.cache.stats().cached_blocks == 1
    memory.request("HEADerone", exact=5, fixed=6)
    memory.request("HEADertwo", exact=6, fixed=6)
    assert (memory.cache.stats().cached_blocks, memory.admit("HEADerthree").exact_tokens) == (3, 6)


def test_a_cached_block_that_begins_so_already_is_enough() -> None:
    memory = Memory()
    memory.request(FIRST)
    memory.request("HEADertwo", exact=6, fixed=6)
    assert memory.cache.stats().cached_blocks == 2


def test_what_is_kept_for_its_beginning_is_never_backed_up() -> None:
    memory = Memory(host_blocks=8, backup_hits=0)
    memory.request("HEADerone", exact=6, fixed=6)
    memory.settle()
    assert (memory.cache.stats().cached_blocks, memory.cache.stats().host_cached_blocks) == (2, 1)


# what it costs others -------------------------------------------------------------------------------------------------


def test_what_is_copied_from_stays_until_it_has_been() -> None:
    """Without being locked, the block that the request begins like would be the one that makes room for it."""
    memory = Memory(5)
    memory.request("HEADeron")
    memory.request("LATERtex")
    lease = memory.admit("HEADertwoxyz")
    assert lease.exact_tokens == 6 and memory.made[-1][0] not in lease.blocks
    assert (memory.cached("HEADeron"), memory.cached("LATERtex")) == (8, 4)
    memory.admit("ZZZZ")
    assert (memory.cached("HEADeron"), memory.cached("LATERtex")) == (8, 0), "and it counts as used"


def test_only_the_block_itself_counts_as_used() -> None:
    memory = Memory(8)
    memory.request("HEADeronelongtail")
    memory.request("LATERtex")
    memory.cache.abort(memory.admit("HEADertw").request_id)
    memory.cache.abort(memory.admit("z" * 4 * SIZE, limit=0).request_id)
    assert (memory.cached("HEADeronelongtail"), memory.cached("LATERtex")) == (8, 8), "the long tail went first"


def test_without_other_room_the_block_goes_and_nothing_is_copied() -> None:
    memory = Memory(3)
    memory.request("HEADeron")
    lease = memory.admit("HEADertwoxyz")
    assert (lease.exact_tokens, len(lease.blocks), memory.made) == (4, 3, [])


def test_a_speculative_request_gives_up_the_beginning_before_its_room() -> None:
    """Of all that may be evicted for it, there is nothing but the block that it begins like."""
    memory = Memory(3)
    memory.cache.on_forecast({"agent": (9.0, 1.0)})
    memory.request("HEADeron")
    memory.cache.on_label(NS, "agent", b"HEADeron")
    assert memory.admit("HEADertwoxyz", steps=1.0).exact_tokens == 4
    assert memory.made == []


def test_no_backup_is_given_up_for_a_beginning() -> None:
    memory = Memory(4, host_blocks=8, backup_hits=1)
    memory.request("HEADeron")
    memory.request("TEXT")
    memory.request("TEXTs")
    assert memory.cache.transferring, "what was hit is to be backed up"
    assert memory.admit("HEADertwoxyz").exact_tokens == 4
    assert memory.cache.stats().transfers["backup"]["cancelled"] == 0


def test_a_copy_that_raises_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    memory.request(FIRST)

    def failing(*_: int) -> None:
        raise MemoryError("no copy")

    with monkeypatch.context() as patch:
        patch.setattr(memory.cache._partial, "_copy", failing)
        with pytest.raises(MemoryError):
            memory.admit("HEADertwo")
    memory.check()
    assert (memory.cache.stats().leased_blocks, memory.cached(FIRST)) == (0, 8)
    assert memory.admit("HEADertwo").exact_tokens == 6
