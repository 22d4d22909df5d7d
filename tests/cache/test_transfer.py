from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kedge.cache import Direction
from kedge.cache.copies import Purpose
from kedge.cache.node import Transfer, TreeNode
from kedge.cache.tiers import TransferQueue
from tests.cache.helpers import NS, FakeCopier

LOAD, OFFLOAD = Direction.LOAD, Direction.OFFLOAD


def queue(jobs: int = 1) -> tuple[TransferQueue, FakeCopier]:
    copier = FakeCopier()
    return TransferQueue(copier, jobs), copier


def enqueue(transfers: TransferQueue, purpose: Purpose, blocks: int = 1) -> Transfer:
    direction = OFFLOAD if purpose is Purpose.BACKUP else LOAD
    numbers = list(range(blocks))
    return transfers.enqueue(direction, purpose, [TreeNode(NS, None, b"", blocks)], numbers, numbers)


def order(copier: FakeCopier, transfers: TransferQueue) -> list[int]:
    """Ids in the order in which they start, one at a time."""
    transfers.start()
    while copier.submitted:
        copier.end()
        transfers.drain()
        transfers.start()
    return [copy.copy_id for copy in copier.history]


def test_demands_go_before_queued_prefetches_and_backups_have_a_way_of_their_own() -> None:
    transfers, copier = queue()
    first, second = enqueue(transfers, Purpose.PREFETCH), enqueue(transfers, Purpose.PREFETCH)
    demand, later = enqueue(transfers, Purpose.DEMAND), enqueue(transfers, Purpose.DEMAND)
    backup = enqueue(transfers, Purpose.BACKUP)
    transfers.start()
    assert [copy.copy_id for copy in copier.submitted] == [demand.copy.copy_id, backup.copy.copy_id]
    rest = [one.copy.copy_id for one in (demand, backup, later, first, second)]
    assert order(copier, transfers) == rest


def test_a_promoted_prefetch_goes_behind_older_demands_and_is_there_once() -> None:
    transfers, copier = queue()
    ids = [enqueue(transfers, purpose).copy.copy_id for purpose in (Purpose.PREFETCH, Purpose.PREFETCH, Purpose.DEMAND)]
    promoted = transfers.queued(LOAD)[-1]
    transfers.promote(promoted)
    transfers.promote(promoted)
    assert order(copier, transfers) == [ids[2], ids[1], ids[0]]


def test_promoting_what_has_started_hurries_its_copy() -> None:
    transfers, copier = queue()
    prefetch = enqueue(transfers, Purpose.PREFETCH)
    transfers.start()
    assert copier.hurried == []
    transfers.promote(prefetch)
    transfers.promote(prefetch)
    assert prefetch.demanded and transfers.queued(LOAD) == [] and len(copier.submitted) == 1
    assert copier.hurried == [prefetch.copy.copy_id]


def test_prefetches_under_way_do_not_hold_up_a_demand() -> None:
    transfers, copier = queue(jobs=2)
    first = enqueue(transfers, Purpose.PREFETCH, 2)
    transfers.start()
    demands = [enqueue(transfers, Purpose.DEMAND) for _ in range(3)]
    waiting = enqueue(transfers, Purpose.PREFETCH)
    transfers.start()
    ids = [one.copy.copy_id for one in (first, *demands[:2])]
    assert [copy.copy_id for copy in copier.submitted] == ids
    assert copier.hurried == ids[1:]
    assert [*transfers.queued(LOAD)] == [demands[2], waiting]


def test_limits_count_the_jobs_of_each_direction() -> None:
    transfers, copier = queue(jobs=2)
    for blocks in (2, 2, 1):
        enqueue(transfers, Purpose.PREFETCH, blocks)
    enqueue(transfers, Purpose.BACKUP, 4)
    transfers.start()
    assert [len(copy.sources) for copy in copier.submitted] == [2, 2, 4]
    assert transfers.demanded_blocks(LOAD) == 0
    transfers.promote(transfers.queued(LOAD)[0])
    assert transfers.demanded_blocks(LOAD) == 1 and transfers.demanded_blocks(OFFLOAD) == 0
    copier.end(0)
    transfers.drain()
    transfers.start()
    assert [len(copy.sources) for copy in copier.submitted] == [2, 4, 1]
    assert transfers.demanded_blocks(LOAD) == 1, "what is under way counts, too"


@given(st.lists(st.sampled_from(["prefetch", "demand", "promote", "start", "end"]), max_size=60))
def test_nothing_is_lost_doubled_or_overtaken(operations: list[str]) -> None:
    transfers, copier = queue(jobs=2)
    made: list[Transfer] = []
    for name in operations:
        if name in ("prefetch", "demand"):
            made.append(enqueue(transfers, Purpose(name)))
        elif name == "promote" and transfers.queued(LOAD):
            transfers.promote(transfers.queued(LOAD)[-1])
        elif name == "start":
            before = transfers.queued(LOAD)
            transfers.start()
            assert before[len(before) - len(transfers.queued(LOAD)) :] == transfers.queued(LOAD)
        elif name == "end" and copier.submitted:
            copier.end()
            transfers.drain()
        demanded = [one.demanded for one in transfers.queued(LOAD)]
        assert demanded == sorted(demanded, reverse=True)
    assert sorted(order(copier, transfers)) == [one.copy.copy_id for one in made]
