"""A tenant's limit on host memory: its own goes for its own, and nobody else notices."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.cache.node import HOST
from kedge.errors import OutOfBlocks
from kedge.policies.eviction import lru
from kedge.types import Namespace
from tests.cache.helpers import NS, World

MINE, OTHER = NS[0], "other"
SALTED, FOREIGN = Namespace(MINE, "salt"), Namespace(OTHER)


def limited(blocks: int | None, host_blocks: int = 32) -> World:
    world = World(32, host_blocks, policy=lru, backup_hits=0, block_bytes=10)
    world.cache.limit_host(MINE, None if blocks is None else blocks * 10 + 9)
    return world


def on_host(world: World, tenant: str = MINE) -> str:
    """The ends of all runs of blocks that a tenant has on the host."""
    nodes = (node for node in world.tree.nodes() if node.namespace.tenant == tenant and node.blocks[HOST])
    return " ".join(sorted(bytes(node.prefix()[::4]).decode() for node in nodes))


def serve(world: World, *texts: str, ns: Namespace = NS) -> None:
    for text in texts:
        world.serve(text, ns=ns)
        world.settle()


def test_the_oldest_of_its_own_goes() -> None:
    world = limited(6)
    serve(world, "xxxx", "yyyy", ns=FOREIGN)
    serve(world, "aaa", "bbb", "ccc")
    assert on_host(world) == "bbb ccc"
    assert on_host(world, OTHER) == "xxxx yyyy"
    assert world.cache.stats().host_evictions == 3
    assert world.cache.stats().host_free_blocks == 32 - 6 - 8
    world.cache.limit_host(MINE, None)
    serve(world, "ddd")
    assert on_host(world) == "bbb ccc ddd"


def test_all_parts_of_a_tenants_own_count_and_what_is_being_copied() -> None:
    world = limited(4)
    serve(world, "aaa")
    serve(world, "bbb", ns=SALTED)
    assert on_host(world) == "a bbb"
    world = limited(4)
    for text in ("aaa", "bbb"):
        world.serve(text)
    world.settle()
    assert on_host(world) == "aaa", "nothing of its own could go while it was being written"


def test_more_than_ever_fits_is_not_backed_up_and_costs_nothing() -> None:
    world = limited(4)
    serve(world, "xxxx", ns=FOREIGN)
    serve(world, "aaa", "bbbbb")
    assert (on_host(world), on_host(world, OTHER)) == ("aaa", "xxxx")
    assert world.cache.stats().skipped_backups == 2, "tried when it was committed, and when it had finished"


def test_without_room_for_all_of_a_copy_nothing_goes() -> None:
    world = limited(6, host_blocks=8)
    serve(world, "aaa")
    world.serve("xxxxx", ns=FOREIGN)
    serve(world, "bbbb")
    assert (on_host(world), on_host(world, OTHER)) == ("aaa", "xxxxx")


TEXTS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=8)


@given(TEXTS, st.integers(1, 12))
def test_with_one_tenant_the_order_is_that_of_all(texts: list[str], n: int) -> None:
    world = limited(None, host_blocks=64)
    serve(world, *texts)
    twin = copy.deepcopy(world.tree)
    held = world.tree.shares[HOST].size
    if n > held:
        with pytest.raises(OutOfBlocks):
            world.tree.evict(HOST, n, tenant=MINE)
        assert world.tree.shares[HOST].size == held
        return
    own = world.tree.evict(HOST, n, tenant=MINE)
    assert [one.blocks for one in own] == [one.blocks for one in twin.evict(HOST, n)]
