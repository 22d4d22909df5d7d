"""Copies between the tiers, and the contract of a copier."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.cache import Copied, Copy, Direction
from kedge.kv.copy import PoolCopier, PoolPairs, block_runs, host_pools
from kedge.kv.storage import PagedStorage
from tests.kv.test_storage import ROTARY, SPEC

BLOCKS, SIZE = 8, 4


def filled(dtype: torch.dtype = torch.float32) -> PoolPairs:
    """Both tiers, filled so that no two values are alike."""
    storage = PagedStorage(replace(SPEC, dtype=dtype), BLOCKS, SIZE, torch.device("cpu"), ROTARY)
    pools = host_pools(storage, BLOCKS)
    for host, device in pools:
        host.copy_(torch.randn(host.shape))
        device.copy_(torch.randn(device.shape))
    return pools


class VirtualTime(threading.Event):
    """The clock of a copier, and the event that it waits for: time that passes by waiting only."""

    def __init__(self, patch: pytest.MonkeyPatch, copier: PoolCopier) -> None:
        super().__init__()
        self._now, self.gate, self.copier = 0.0, threading.Event(), copier
        patch.setattr("kedge.kv.copy.time", self)
        copier._closed = self

    def perf_counter(self) -> float:
        return self._now

    def wait(self, timeout: float | None = None) -> bool:
        self._now += timeout or 0.0
        return False


class Hurrying(VirtualTime):
    """The last of three copies is hurried after the first piece of the first one."""

    def wait(self, timeout: float | None = None) -> bool:
        assert self.gate.wait(60), "all three should be queued by now"
        self.copier.hurry(2)
        self.copier.hurry(7)
        return super().wait(timeout)


def drained(copier: PoolCopier, ended: threading.Semaphore, count: int) -> list[Copied]:
    """Wait until so many copies have ended, and close the copier."""
    assert all(ended.acquire(timeout=60) for _ in range(count))
    copier.close()
    return copier.drain()


def naive(source: torch.Tensor, target: torch.Tensor, copy: Copy) -> torch.Tensor:
    """What `target` holds after `copy`, block by block."""
    result = target.clone()
    for a, b in zip(copy.sources, copy.targets, strict=True):
        result[:, b * SIZE : (b + 1) * SIZE] = source[:, a * SIZE : (a + 1) * SIZE]
    return result


@settings(max_examples=30, deadline=None)
@given(
    st.permutations(range(BLOCKS)),
    st.permutations(range(BLOCKS)),
    st.integers(0, BLOCKS),
    st.sampled_from(Direction),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_exactly_the_blocks_of_the_order_move(
    sources: list[int], targets: list[int], count: int, direction: Direction, dtype: torch.dtype
) -> None:
    pools, here = filled(dtype), 0 if direction is Direction.LOAD else 1
    copy = Copy(7, direction, tuple(sources[:count]), tuple(targets[:count]))
    expected = [naive(pair[here], pair[1 - here], copy) for pair in pools]
    untouched = pools[0][here].clone()
    ended = threading.Semaphore(0)
    copier = PoolCopier(pools, SIZE, on_copied=ended.release)
    copier.submit(copy)
    [one] = drained(copier, ended, 1)
    assert (one.copy_id, one.ok) == (7, True)
    assert all(torch.equal(pair[1 - here], one) for pair, one in zip(pools, expected, strict=True))
    assert torch.equal(pools[0][here], untouched)


@given(st.permutations(range(BLOCKS)), st.permutations(range(BLOCKS)))
def test_runs_are_the_pairs_joined(sources: list[int], targets: list[int]) -> None:
    runs = block_runs(tuple(sources), tuple(targets))
    assert [(a + i, b + i) for a, b, n in runs for i in range(n)] == list(zip(sources, targets, strict=True))
    ends = [(a + n, b + n) for a, b, n in runs]
    assert all(end != run[:2] for end, run in zip(ends, runs[1:], strict=False))


def test_submit_does_not_wait_and_loads_go_before_offloads(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, gate = threading.Semaphore(0), threading.Event()
    copier = PoolCopier(filled(), SIZE, throttle=0.05, on_copied=lambda: (ended.release(), gate.wait(60)))
    VirtualTime(monkeypatch, copier)
    copier.submit(Copy(0, Direction.OFFLOAD, (1, 2), (3, 4)))
    assert ended.acquire(timeout=60), "from now on its thread does nothing"
    copier.submit(Copy(1, Direction.OFFLOAD, (1, 2), (3, 4)))
    copier.submit(Copy(2, Direction.LOAD, (1, 2), (3, 4)))
    gate.set()
    done = drained(copier, ended, 2)
    assert [one.copy_id for one in done] == [0, 2, 1]
    assert [one.seconds for one in done] == pytest.approx([0.1] * 3), "the throttle is in a copy's time, the queue not"


def test_the_pass_that_a_copy_waits_for_is_no_time_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Semaphore(0)
    copier = PoolCopier(filled(), SIZE, throttle=0.05, on_copied=ended.release)
    clock = VirtualTime(monkeypatch, copier)
    monkeypatch.setattr(copier, "_now", lambda: SimpleNamespace(synchronize=lambda: clock.wait(30.0)))
    copier.submit(Copy(0, Direction.LOAD, (1, 2), (3, 4)))
    [one] = drained(copier, ended, 1)
    assert one.seconds == pytest.approx(0.1) and clock.perf_counter() == pytest.approx(30.1)


def test_a_copy_in_a_hurry_goes_before_the_rest_of_one_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.kv.copy.PIECE", 1)
    pools = filled()
    expected = naive(*pools[0], Copy(0, Direction.LOAD, tuple(range(6)), tuple(range(6))))
    ended = threading.Semaphore(0)
    copier = PoolCopier(pools, SIZE, throttle=0.03, on_copied=ended.release)
    clock = Hurrying(monkeypatch, copier)
    for number, blocks in enumerate([(0, 1, 2), (3, 4), (5,)]):
        copier.submit(Copy(number, Direction.LOAD, blocks, blocks))
    clock.gate.set()
    done = drained(copier, ended, 3)
    assert [one.copy_id for one in done] == [2, 0, 1]
    assert [one.seconds for one in done] == pytest.approx([0.03, 0.09, 0.06]), "each without what went before it"
    assert torch.equal(pools[0][1], expected)


def test_only_what_has_not_begun_is_cancelled_and_then_it_neither_ends_nor_moves() -> None:
    pools, ended, gate = filled(), threading.Semaphore(0), threading.Event()
    copier = PoolCopier(pools, SIZE, on_copied=lambda: (ended.release(), gate.wait(60)))
    before = pools[0][1].clone()
    copier.submit(Copy(0, Direction.LOAD, (0,), (1,)))
    assert ended.acquire(timeout=60), "from now on its thread does nothing"
    assert not copier.cancel(0) and not copier.cancel(9)
    copier.submit(Copy(1, Direction.LOAD, (2,), (3,)))
    copier.submit(Copy(2, Direction.LOAD, (4,), (5,)))
    assert copier.cancel(1) and not copier.cancel(1)
    gate.set()
    assert [one.copy_id for one in drained(copier, ended, 1)] == [0, 2]
    assert torch.equal(pools[0][1][:, 3 * SIZE : 4 * SIZE], before[:, 3 * SIZE : 4 * SIZE])


def test_a_copy_that_raises_is_reported_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Semaphore(0)
    copier = PoolCopier(filled(), SIZE, on_copied=ended.release)
    with monkeypatch.context() as patch:
        patch.setattr("kedge.kv.copy.block_runs", raising)
        copier.submit(Copy(0, Direction.LOAD, (0,), (1,)))
        assert ended.acquire(timeout=60)
    copier.submit(Copy(1, Direction.LOAD, (0,), (1,)))
    failed, good = drained(copier, ended, 1)
    assert (failed, good.ok) == (Copied(0, ok=False), True)


def raising(*_: object) -> None:
    raise RuntimeError("out of pinned memory")


def test_close_does_not_wait_for_what_has_not_begun_and_unpins_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    unpinned, pools = list[int](), filled()
    copier = PoolCopier(pools, SIZE, throttle=1000)
    copier._cuda = True
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostUnregister=unpinned.append))
    for number in range(10):
        copier.submit(Copy(number, Direction.LOAD, (0,), (1,)))
    assert copier._thread.is_alive()
    closing = threading.Thread(target=lambda: [copier.close() for _ in range(2)])
    closing.start()
    closing.join(60)
    assert not closing.is_alive() and not copier._thread.is_alive()
    assert unpinned == [host.data_ptr() for host, _ in pools]
