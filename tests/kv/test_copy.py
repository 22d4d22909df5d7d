"""Copies between the tiers, and the contract of a copier."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.cache import Copied, Copier, Copy, Direction
from kedge.kv.copy import HostStorage, TorchCopier, block_runs
from kedge.kv.rotary import Rotary
from kedge.kv.spec import KVSpec
from kedge.kv.storage import PagedStorage
from tests.engine.local.conftest import tiny_model

ROTARY = Rotary(tiny_model("llama").model.rotary_emb, 512, torch.device("cpu"))
BLOCKS, SIZE = 8, 4


def storages(dtype: torch.dtype = torch.float32) -> tuple[PagedStorage, HostStorage]:
    """Both tiers, filled so that no two values are alike."""
    spec = KVSpec(layers=3, kv_heads=2, head_dim=16, rotary_dim=16, dtype=dtype)
    device = PagedStorage(spec, BLOCKS, SIZE, torch.device("cpu"), ROTARY)
    host = HostStorage(device, BLOCKS)
    for pool in (device.keys, device.values, host.keys, host.values):
        pool.copy_(torch.randn(pool.shape))
    return device, host


def ended(copier: TorchCopier, count: int) -> list[Copied]:
    """Waits until so many copies have ended."""
    found: list[Copied] = []
    deadline = time.monotonic() + 10
    while len(found) < count and time.monotonic() < deadline:
        found += copier.drain()
        time.sleep(1e-4)
    return found


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
    device, host = storages(dtype)
    here, there = (host, device) if direction is Direction.LOAD else (device, host)
    copy = Copy(7, direction, tuple(sources[:count]), tuple(targets[:count]))
    expected = [naive(getattr(here, name), getattr(there, name), copy) for name in ("keys", "values")]
    untouched = here.keys.clone()
    copier = TorchCopier(device, host)
    copier.submit(copy)
    assert [(one.copy_id, one.ok) for one in ended(copier, 1)] == [(7, True)]
    copier.close()
    assert torch.equal(there.keys, expected[0]) and torch.equal(there.values, expected[1])
    assert torch.equal(here.keys, untouched)


@given(st.permutations(range(BLOCKS)), st.permutations(range(BLOCKS)))
def test_runs_are_the_pairs_joined(sources: list[int], targets: list[int]) -> None:
    runs = block_runs(tuple(sources), tuple(targets))
    assert [(a + i, b + i) for a, b, n in runs for i in range(n)] == list(zip(sources, targets, strict=True))
    ends = [(a + n, b + n) for a, b, n in runs]
    assert all(end != run[:2] for end, run in zip(ends, runs[1:], strict=False))


def test_it_is_a_copier_and_reports_each_copy_once() -> None:
    copier: Copier = TorchCopier(*storages())
    for number in range(20):
        copier.submit(Copy(number, Direction.LOAD, (number % BLOCKS,), (number % BLOCKS,)))
    assert isinstance(copier, TorchCopier)
    assert sorted(one.copy_id for one in ended(copier, 20)) == list(range(20))
    assert copier.drain() == []
    copier.close()


def test_submit_does_not_wait_and_loads_go_before_offloads() -> None:
    woken = threading.Semaphore(0)
    copier = TorchCopier(*storages(), throttle=0.05, on_copied=woken.release)
    began = time.monotonic()
    for number, direction in enumerate([Direction.OFFLOAD, Direction.OFFLOAD, Direction.LOAD]):
        copier.submit(Copy(number, direction, (1, 2), (3, 4)))
    assert time.monotonic() - began < 0.05
    for _ in range(3):
        assert woken.acquire(timeout=10)
    done = copier.drain()
    copier.close()
    assert [one.copy_id for one in done][-1] == 1
    assert all(0.1 <= one.seconds < 1 for one in done), "the throttle is in the time of the copy, the queue is not"


def test_a_copy_in_a_hurry_goes_before_the_rest_of_one_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.kv.copy.PIECE", 1)
    device, host = storages()
    expected = [naive(host.keys, device.keys, Copy(0, Direction.LOAD, tuple(range(6)), tuple(range(6))))]
    copier = TorchCopier(device, host, throttle=0.03)
    began = time.monotonic()
    for number, blocks in enumerate([(0, 1, 2), (3, 4), (5,)]):
        copier.submit(Copy(number, Direction.LOAD, blocks, blocks))
    copier.hurry(2)
    copier.hurry(7)
    done = ended(copier, 3)
    elapsed = time.monotonic() - began
    copier.close()
    assert [one.copy_id for one in done] == [2, 0, 1]
    assert [one.seconds >= 0.03 * blocks for one, blocks in zip(done, (1, 3, 2), strict=True)] == [True] * 3
    assert sum(one.seconds for one in done) <= elapsed, "the time in which another went first is not its own"
    assert torch.equal(device.keys, expected[0])


def test_a_copy_that_raises_is_reported_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    copier = TorchCopier(*storages())
    copy_runs = TorchCopier._copy_runs

    def fails_once(*_: object) -> None:
        monkeypatch.setattr(TorchCopier, "_copy_runs", copy_runs)
        raise RuntimeError("out of pinned memory")

    monkeypatch.setattr(TorchCopier, "_copy_runs", fails_once)
    copier.submit(Copy(0, Direction.LOAD, (0,), (1,)))
    assert ended(copier, 1) == [Copied(0, ok=False)]
    copier.submit(Copy(1, Direction.LOAD, (0,), (1,)))
    assert [one.ok for one in ended(copier, 1)] == [True]
    copier.close()


def test_close_does_not_wait_for_what_has_not_begun() -> None:
    copier = TorchCopier(*storages(), throttle=5.0)
    for number in range(10):
        copier.submit(Copy(number, Direction.LOAD, (0,), (1,)))
    began = time.monotonic()
    copier.close()
    copier.close()
    assert time.monotonic() - began < 2
    assert not any(thread.name == "kedge-copier" and thread.is_alive() for thread in [copier._thread])
