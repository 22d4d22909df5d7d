"""Blocks that several leases hold: freed with the last of them, and never cached."""

from __future__ import annotations

from itertools import permutations

import pytest

from kedge.cache import CacheManager
from kedge.errors import PlanError
from kedge.types import Namespace, RequestId, TenantId

NS = Namespace(TenantId("tenant"))
A, B, C = (RequestId(name) for name in "abc")


@pytest.fixture
def cache() -> CacheManager:
    """Two leases of four blocks, of which the first one is exact; a third one of six."""
    cache = CacheManager(16, block_size=2)
    for name, text in ((A, b"aa000000"), (B, b"bb000000"), (C, b"cc0000000000")):
        cache.admit(name, NS, text, 2, len(text))
    return cache


def free(cache: CacheManager) -> int:
    cache.check_integrity()
    return cache.stats().free_blocks


def held(cache: CacheManager, request: RequestId) -> tuple[int, ...]:
    return cache.extend(request, 0).blocks


def test_a_borrower_gives_its_own_blocks_back(cache: CacheManager) -> None:
    before, lender = held(cache, B), held(cache, A)
    blocks = cache.borrow(B, A, [1, 3]).blocks
    assert blocks == (before[0], lender[1], before[2], lender[3])
    assert free(cache) == 2 + 2
    assert cache.stats().leased_blocks == 12, "a block that two hold is counted once"


@pytest.mark.parametrize("order", list(permutations((A, B, C))))
def test_blocks_are_freed_with_the_last_lease(cache: CacheManager, order: tuple[RequestId, ...]) -> None:
    lent = held(cache, A)[1:3]
    cache.borrow(B, A, [1, 2])
    cache.borrow(C, B, [1, 2])
    own = {A: 2, B: 2, C: 4}
    expected = free(cache)
    for number, request in enumerate(order):
        cache.abort(request)
        expected += own[request] + (len(lent) if number == 2 else 0)
        assert free(cache) == expected
    assert expected == 16


def test_borrowing_twice_changes_nothing(cache: CacheManager) -> None:
    lease, expected = cache.borrow(B, A, [1, 2]), free(cache)
    assert cache.borrow(B, A, [2, 1, 1]) == lease
    assert cache.borrow(A, B, [1]) == cache.extend(A, 0)
    assert free(cache) == expected
    cache.abort(A)
    cache.abort(B)
    assert free(cache) == 16 - 6


def test_what_comes_before_is_shared(cache: CacheManager) -> None:
    cache.borrow(B, A, [1, 2, 3])
    cache.commit_prefix(A, b"aa")
    cache.finish(B, b"bb")
    assert cache.match(NS, b"bb").tokens_count == 2
    cache.finish(A, b"aa")
    assert free(cache) == 16 - 6 - 2


def test_borrowed_blocks_are_never_cached(cache: CacheManager) -> None:
    cache.borrow(B, A, [1])
    for request, tokens in ((A, b"aa00"), (B, b"bb0000")):
        with pytest.raises(PlanError, match="other leases hold"):
            cache.commit_prefix(request, tokens)
        free(cache)
    cache.abort(B)
    cache.finish(A, b"aa00")
    assert cache.match(NS, b"aa00").tokens_count == 4, "its own again"


def test_a_lease_that_grows_or_gets_an_heir_keeps_what_it_borrowed(cache: CacheManager) -> None:
    blocks = cache.borrow(B, A, [2, 3]).blocks
    assert cache.extend(B, 10).blocks[:4] == blocks
    heir = RequestId("heir")
    assert cache.hand_over(B, heir).blocks[:4] == blocks
    cache.abort(A)
    cache.abort(heir)
    assert free(cache) == 16 - 6


@pytest.mark.parametrize("places", [[4], [-1], [0, 9]])
def test_places_without_a_block_are_refused(cache: CacheManager, places: list[int]) -> None:
    before = held(cache, B)
    with pytest.raises(PlanError, match="no block there"):
        cache.borrow(B, C, places)
    assert held(cache, B) == before and free(cache) == 2


def test_cached_blocks_and_ended_leases_are_refused(cache: CacheManager) -> None:
    cache.commit_prefix(A, b"aa00")
    for mine, other in ((A, B), (B, A)):
        with pytest.raises(PlanError, match="cached"):
            cache.borrow(mine, other, [1, 2])
    cache.abort(A)
    for mine, other in ((A, B), (B, A)):
        with pytest.raises(PlanError, match="holds no lease"):
            cache.borrow(mine, other, [2])
    assert cache.match(NS, b"aa00").tokens_count == 4
    assert free(cache) == 16 - 6 - 4 - 2
