"""The disk tier with files that tests hold in their hand."""

from __future__ import annotations

import random

import pytest

from kedge.cache.disk import DiskLimits
from kedge.errors import ConfigError, OutOfBlocks
from kedge.settings import TierSettings
from kedge.types import Namespace, RequestId, TenantId
from tests.cache.disk_world import DiskWorld
from tests.cache.helpers import NS

OTHER = Namespace(TenantId("other"))


def stored(*texts: str, **settings: object) -> DiskWorld:
    """A world in which the disk alone has these prompts."""
    world = DiskWorld(**settings)
    for text in texts:
        world.ask(text)
    world.forget_memory()
    return world


def back_up(world: DiskWorld, text: str) -> None:
    """Serves a prompt, and backs it up to the host: it is about to be written."""
    world.serve(text)
    world.cache.pump()
    world.copier.end_all()
    world.cache.pump()
    world.check()


def test_what_was_backed_up_comes_back_from_the_disk() -> None:
    world = stored("ABCDE")
    assert world.tokens("ABCDE") == (0, 0)
    assert world.demand("ABCDEF") == "loading"
    assert not world.copier.submitted, "the host has nothing yet"
    world.files.end_read()
    world.cache.pump()
    world.check()
    assert world.tokens("ABCDE") == (0, 5)
    assert world.ask("ABCDEF") == 5
    assert world.cache.stats().disk["read"] == 5


def test_only_what_is_new_of_a_growing_session_is_written() -> None:
    world = DiskWorld()
    for text in ("ABC", "ABCDE", "ABXY", "ABCDEF"):
        world.ask(text)
    assert [order.key[::4].decode() for order, _ in world.files.files.values()] == ["ABC", "DE", "XY", "F"]
    assert world.cache.stats().disk_blocks == 8
    world.forget_memory()
    assert [world.ask(text) for text in ("ABXY", "ABCDEF")] == [4, 6]


def test_a_restarted_engine_finds_all_of_it() -> None:
    files = stored("ABCDE", "ABXY", "ABCDEFG").files
    world = DiskWorld(files=files)
    world.check()
    assert [world.ask(text) for text in ("ABCDEFG", "ABXY", "AB")] == [7, 4, 2]


def test_files_without_those_before_them_are_deleted_at_the_start() -> None:
    files = stored("ABC", "ABCDE", "ABCDEFG").files
    del files.files[next(name for name, (order, _) in files.files.items() if order.key[::4] == b"DE")]
    world = DiskWorld(files=files)
    world.settle()
    assert len(world.files.files) == 1 and world.ask("ABCDEFG") == 3


def test_a_smaller_disk_at_the_start_keeps_what_was_used_last() -> None:
    world = DiskWorld(files=stored("ABC", "XYZ", "QRS").files, disk_blocks=6)
    world.settle()
    assert [world.ask(text) for text in ("QRS", "XYZ", "ABC")] == [3, 3, 0]


def test_what_was_used_longest_ago_goes_first_and_never_before_what_follows_it() -> None:
    world = DiskWorld(disk_blocks=7)
    for text in ("ABC", "XYZ", "ABCD"):
        world.ask(text)
    world.ask("QR")
    assert len(world.files.files) == 3 and world.cache.stats().disk["evicted"] == 3
    world.forget_memory()
    assert [world.ask(text) for text in ("QR", "ABCD")] == [2, 4]


def test_two_requests_wait_for_one_read() -> None:
    world = stored("ABCDE")
    assert (world.demand("ABCDE", "one"), world.demand("ABCXX", "two")) == ("loading", "loading")
    assert len(world.files.reads) == 1
    assert (world.ask("ABCXX", "two"), world.ask("ABCDE", "one")) == (3, 5)


def test_a_request_that_no_longer_waits_leaves_the_read() -> None:
    world = stored("ABCDE")
    world.demand("ABCDE")
    assert world.cache.transferring
    world.cache.withdraw(RequestId("waiting"))
    assert not world.cache.transferring, "nobody waits for the disk"
    world.settle()
    assert world.tokens("ABCDE") == (0, 5)


def test_tenants_share_nothing() -> None:
    world = stored("ABC")
    assert world.cache.demand(RequestId("r"), OTHER, b"ABC").value == "ready"
    assert not world.files.reads


def test_the_other_tenants_files_stay_when_one_is_cleared() -> None:
    world = stored("ABC")
    lease = world.admit("ABC", ns=OTHER)
    world.cache.finish(lease.request_id, b"ABC")
    world.settle()
    world.cache.clear(NS)
    world.settle()
    assert [order.namespace for order, _ in world.files.files.values()] == [OTHER]
    world.cache.clear()
    world.settle()
    assert not world.files.files and world.cache.stats().disk_blocks == 0


def test_what_is_read_of_a_cleared_namespace_is_dropped() -> None:
    world = stored("ABC")
    world.demand("ABC")
    world.cache.clear()
    world.settle()
    assert world.tokens("ABC") == (0, 0) and world.ask("ABC") == 0


# faults ---------------------------------------------------------------------------------------------------------------


def test_a_damaged_file_is_a_miss_and_goes_with_all_that_follow_it() -> None:
    world = stored("ABC", "ABCDE", "ABCDEFG")
    name = next(name for name, (order, _) in world.files.files.items() if order.key[::4] == b"DE")
    world.files.damaged.add(name)
    assert world.ask("ABCDEFG") == 3
    assert world.cache.stats().disk["corrupt"] == 4
    assert name not in world.files.files, "what was computed again is written anew"
    world.forget_memory()
    assert world.ask("ABCDEFG") == 7


def test_a_disk_that_fails_is_a_miss() -> None:
    world = stored("ABC")
    world.demand("ABC")
    world.files.end_read(ok=False)
    world.cache.pump()
    world.check()
    assert world.demand("ABC") == "ready"
    assert (world.cache.stats().disk["failed"], world.cache.stats().disk_blocks) == (3, 0)


def test_writes_that_fail_are_counted_and_tried_again_with_the_next_backup() -> None:
    world = DiskWorld()
    back_up(world, "ABC")
    world.files.end_write(ok=False)
    world.cache.pump()
    world.check()
    assert (world.cache.stats().disk["skipped"], world.cache.stats().disk_blocks) == (3, 0)
    world.ask("ABCD")
    world.forget_memory()
    assert world.ask("ABCD") == 4


def test_a_disk_that_is_behind_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.cache.disk.MAX_WRITES", 2)
    world = DiskWorld(num_blocks=40, host_blocks=40)
    for text in ("AB", "CD", "EF", "GH"):
        back_up(world, text)
    assert len(world.files.writes) == 2 and world.cache.stats().disk["skipped"] == 4
    assert not world.cache.transferring


def test_host_blocks_that_are_evicted_before_they_are_written_are_not_stored() -> None:
    world = DiskWorld()
    back_up(world, "ABC")
    world.forget_memory()
    back_up(world, "XYZ")
    world.settle()
    world.forget_memory()
    assert (world.ask("ABC"), world.ask("XYZ")) == (0, 3)


def test_what_is_not_written_yet_is_not_read() -> None:
    world = DiskWorld()
    back_up(world, "ABC")
    world.forget_memory()
    assert world.demand("ABC") == "ready" and not world.files.reads
    world.settle()
    assert world.cache.stats().disk_blocks == 3


def test_a_full_host_is_a_miss_and_what_requests_wait_for_stays() -> None:
    world = stored("ABCDE", host_blocks=5, num_blocks=5)
    world.ask("VWXYZ")
    world.evict(5)
    assert world.demand("VWXYZ", "first") in ("loading", "loadable")
    assert world.demand("ABCDE", "second") == "ready"
    assert world.cache.stats().disk["failed"] == 5


def test_a_tenant_reads_no_more_than_its_share_of_the_host() -> None:
    world = stored("ABCDE")
    world.cache.limit_host(NS.tenant, 4)
    assert world.demand("ABCDE") == "ready" and not world.files.reads


def test_a_prefix_that_only_the_device_has_is_read_for_the_host_too() -> None:
    world = stored("ABCDE", backup_hits=0)
    world.cache.tiers.backups.limits[NS.tenant] = 0
    world.serve("AB")
    world.cache.limit_host(NS.tenant, None)
    assert world.tokens("AB") == (2, 0) and world.cache.stats().host_cached_blocks == 0
    assert world.ask("ABCDE") == 5 and world.cache.stats().host_cached_blocks == 5


def test_a_recompute_overtakes_the_read() -> None:
    world = stored("ABCDE")
    world.demand("ABCDE", "slow")
    lease = world.admit("ABCDE", request=RequestId("slow"))
    assert lease.exact_tokens == 0
    world.cache.finish(lease.request_id, b"ABCDE")
    world.check()
    world.files.end_read()
    world.cache.pump()
    world.check()
    world.settle()
    assert world.serve("ABCDE") == 5


# settings -------------------------------------------------------------------------------------------------------------


def test_a_disk_needs_a_host_tier_and_room_for_a_block() -> None:
    with pytest.raises(ConfigError, match=r"engine\.tiers\.disk_path=.*host_memory"):
        TierSettings(disk_path="somewhere")
    with pytest.raises(ConfigError, match=r"engine\.tiers\.disk_memory=3"):
        DiskLimits.of(TierSettings(host_blocks=1, disk_path="somewhere", disk_memory=3), block_bytes=8)


# at random ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_integrity_whatever_ends_when_and_how(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny tiers, two tenants, restarts, failing and damaged files: every hit has the content that was asked for."""
    monkeypatch.setattr("kedge.cache.disk.MAX_FILE_BYTES", 2)
    rng = random.Random(seed)
    world = DiskWorld(14, 7, disk_blocks=12)
    read = 0
    for at in range(3000):
        text = "".join(rng.choices("AB", k=rng.randrange(1, 6)))
        space = rng.choice((NS, NS, OTHER))
        action = rng.choices(("serve", "wait", "copy", "write", "read", "pump", "clear", "restart"),
                             (10, 10, 12, 6, 8, 10, 0.2, 0.2))[0]  # fmt: skip
        try:
            if action == "serve":
                lease = world.admit(text, request=RequestId(f"r{rng.randrange(3)}-{at}"), ns=space)
                world.cache.finish(lease.request_id, text.encode())
            elif action == "wait":
                name = RequestId(f"w{at % 4}")
                world.cache.demand(name, space, text.encode())
                if rng.random() < 0.7:
                    world.cache.withdraw(name)
        except OutOfBlocks:
            pass
        if action == "copy" and world.copier.submitted:
            world.copier.end(rng.randrange(len(world.copier.submitted)), ok=rng.random() < 0.9)
        elif action == "write" and world.files.writes:
            world.files.end_write(ok=rng.random() < 0.9)
        elif action == "read" and world.files.reads:
            world.files.damaged = {name for name in world.files.files if rng.random() < 0.05}
            world.files.end_read(rng.randrange(len(world.files.reads)), ok=rng.random() < 0.9)
        elif action == "pump":
            world.cache.pump()
        elif action == "clear":
            world.cache.clear(space)
        elif action == "restart":
            read += world.cache.stats().disk["read"]
            world.settle()
            world = DiskWorld(14, 7, disk_blocks=12, files=world.files)
        world.check()
    for name in range(4):
        world.cache.withdraw(RequestId(f"w{name}"))
    world.settle()
    stats = world.cache.stats()
    assert read + stats.disk["read"] > 0 and stats.reading_blocks == 0
    assert stats.disk_blocks == sum(len(order.blocks) for order, _ in world.files.files.values())
