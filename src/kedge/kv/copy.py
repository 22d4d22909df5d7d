"""The host tier's memory, and the thread that copies blocks between it and the device (KVFlow, section 3.2)."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from kedge.cache.transfer import Copied, Copy, Direction
from kedge.kv.storage import PagedStorage

logger = logging.getLogger(__name__)
T = TypeVar("T")


class HostStorage:
    """Keys and values of the host tier's slots, in the layout of the device's; pinned where that is a GPU."""

    def __init__(self, device: PagedStorage, num_blocks: int) -> None:
        layers, _, *token = device.keys.shape
        shape, pinned = (layers, num_blocks * device.block_size, *token), device.keys.is_cuda
        self.keys = torch.empty(shape, dtype=device.keys.dtype, pin_memory=pinned)
        self.values = torch.empty(shape, dtype=device.values.dtype, pin_memory=pinned)


class TorchCopier:
    """Carries out copies on a thread of its own, as `kedge.cache.Copier` says; loads before offloads.

    On a GPU on a stream of its own, after whatever was started before `submit`. On the CPU by one thread that never
    asks for a second one, since the model wants the others.
    """

    def __init__(
        self,
        device: PagedStorage,
        host: HostStorage,
        throttle: float = 0.0,
        on_copied: Callable[[], None] = lambda: None,
    ) -> None:
        """`throttle`: seconds that a block takes at least. `on_copied` is called on the copier's thread whenever there
        is something to drain.
        """
        self._block_size, self._throttle, self._on_copied = device.block_size, throttle, on_copied
        self._cuda = device.keys.is_cuda
        self._stream = torch.cuda.Stream(device.keys.device) if self._cuda else None
        self._pools = [(host.keys, device.keys), (host.values, device.values)]
        self._orders: queue.PriorityQueue[tuple[int, int, Copy | None, torch.cuda.Event | None]]
        self._orders = queue.PriorityQueue()
        self._count = itertools.count()
        self._ended: queue.SimpleQueue[Copied] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kedge-copier", daemon=True)
        self._thread.start()

    def submit(self, copy: Copy) -> None:
        """Queues a copy. Returns at once and does not raise; once closed, nothing is copied any more."""
        self._orders.put((copy.direction is Direction.OFFLOAD, next(self._count), copy, self._now()))

    def drain(self) -> list[Copied]:
        """What has ended since the last call."""
        return _taken(self._ended)

    def close(self) -> None:
        """Ends the thread after the copy under way. Idempotent."""
        self._closed.set()
        self._orders.put((-1, next(self._count), None, None))
        self._thread.join()

    def _now(self) -> torch.cuda.Event | None:
        return torch.cuda.current_stream(self._stream.device).record_event() if self._stream else None

    # the copier's thread --------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closed.is_set():
            _, _, copy, after = self._orders.get()
            if copy is not None:
                self._ended.put(self._carry_out(copy, after))
                self._on_copied()

    def _carry_out(self, copy: Copy, after: torch.cuda.Event | None) -> Copied:
        began = time.perf_counter()
        try:
            self._copy(copy, after)
        except Exception:  # whatever a driver raises: the cache counts it and computes the blocks
            logger.exception("copy %s failed", copy.copy_id)
            return Copied(copy.copy_id, ok=False)
        self._closed.wait(max(0.0, began + self._throttle * len(copy.sources) - time.perf_counter()))
        return Copied(copy.copy_id, ok=True, seconds=time.perf_counter() - began)

    def _copy(self, copy: Copy, after: torch.cuda.Event | None) -> None:
        """Returns once the target holds the data."""
        runs = block_runs(copy.sources, copy.targets)
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            if self._stream and after:
                self._stream.wait_event(after)
            for host, device in self._pools:
                source, target = (host, device) if copy.direction is Direction.LOAD else (device, host)
                self._copy_runs(source, target, runs)
        if self._stream:
            self._stream.synchronize()

    def _copy_runs(self, source: Tensor, target: Tensor, runs: list[tuple[int, int, int]]) -> None:
        copy_slots = _copy_by_layer if self._cuda else _copy_on_one_thread
        for first, to, count in runs:
            size = count * self._block_size
            a, b = first * self._block_size, to * self._block_size
            copy_slots(source[:, a : a + size], target[:, b : b + size])


def block_runs(sources: tuple[int, ...], targets: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Pairs of blocks as runs (first source, first target, count) of neighbours on both sides."""
    runs: list[tuple[int, int, int]] = []
    for source, target in zip(sources, targets, strict=True):
        if runs and (source, target) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            first, to, count = runs.pop()
            runs.append((first, to, count + 1))
        else:
            runs.append((source, target, 1))
    return runs


def _copy_by_layer(source: Tensor, target: Tensor) -> None:
    """Each layer's run is contiguous, so it moves without a buffer in between. Does not wait for its end."""
    for a, b in zip(source, target, strict=True):
        b.copy_(a, non_blocking=True)


def _copy_on_one_thread(source: Tensor, target: Tensor) -> None:
    """All layers at once. NumPy copies on the thread that asks, where PyTorch would take all cores."""
    _bytes(target)[...] = _bytes(source)


def _bytes(tensor: Tensor) -> Any:
    """A view as a NumPy array of bytes, whatever the dtype: NumPy has no bfloat16."""
    return tensor.view(torch.uint8).numpy()


def _taken(items: queue.SimpleQueue[T]) -> list[T]:
    """All that is in the queue now; only one thread takes."""
    return [items.get_nowait() for _ in range(items.qsize())]
