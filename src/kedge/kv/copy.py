"""The host tier's memory, and the thread that copies blocks between it and the device (KVFlow, section 3.2)."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from kedge.cache.copies import Copied, Copy, Direction
from kedge.kv.storage import PagedStorage

logger = logging.getLogger(__name__)
PIECE, GPU_PIECE = 1 << 20, 8 << 20
"""Bytes after which a copy yields to a more urgent one: well below a millisecond."""
PoolPairs = Sequence[tuple[Tensor, Tensor]]
"""Pairs (host, device) of tensors with equal shapes but for the second dimension, along which slots lie."""


def host_pools(device: PagedStorage, num_blocks: int) -> PoolPairs:
    """Return pools of new slots on the host, each paired with the device's: keys, then values."""
    layers, _, *token = device.keys.shape
    shape = layers, num_blocks * device.block_size, *token
    return [(torch.empty(shape, dtype=pool.dtype), pool) for pool in (device.keys, device.values)]


@dataclass(slots=True)
class _Order:
    """A queued copy: the first `done` blocks have been copied, in `seconds`."""

    copy: Copy
    after: torch.cuda.Event | None
    urgent: bool = False
    begun: bool = False
    done: int = 0
    seconds: float = 0.0

    @property
    def rank(self) -> tuple[bool, bool]:
        """Return the sort key; the least goes first, and of several the one that came first."""
        return not self.urgent, self.copy.direction is Direction.OFFLOAD


class PoolCopier:
    """A copier with its own thread, as `kedge.cache.Copier` specifies: urgent copies first, then loads, then offloads.
    It copies piece by piece, so that a running copy delays an urgent one by at most a piece.

    On a GPU it uses its own stream, after all work started before `submit`, and pins the host's memory. On the CPU it
    copies with one thread only, since the model needs the others.
    """

    def __init__(
        self,
        pools: PoolPairs,
        block_size: int,
        throttle: float = 0.0,
        on_copied: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the copier's thread. A block is `block_size` neighbouring slots of every pool.

        `throttle` is the least time in seconds that a block takes.
        `on_copied` is called on the copier's thread whenever there is something to drain. Raises `RuntimeError` where
        the host's memory cannot be pinned.
        """
        self._pools, self._block_size, self._throttle, self._on_copied = pools, block_size, throttle, on_copied
        self._cuda = pools[0][1].is_cuda
        self._stream = torch.cuda.Stream(pools[0][1].device) if self._cuda else None
        for host, _ in pools if self._cuda else ():  # with `pin_memory` PyTorch would take the next power of two
            if (error := torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)).value:
                raise RuntimeError(f"{host.nbytes} bytes of the host cannot be pinned: {error}")
        block_bytes = sum(device[:, :block_size].nbytes for _, device in pools)
        self._piece = max(1, (GPU_PIECE if self._cuda else PIECE) // block_bytes)
        self._orders: dict[int, _Order] = {}
        self._changed = threading.Condition()
        self._ended: queue.SimpleQueue[Copied] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kedge-copier", daemon=True)
        self._thread.start()

    def submit(self, copy: Copy) -> None:
        """Queue a copy. Returns at once and does not raise; once closed, nothing is copied any more."""
        order = _Order(copy, self._now())
        with self._changed:
            self._orders[copy.copy_id] = order
            self._changed.notify()

    def hurry(self, copy_id: int) -> None:
        """Move this copy to the front."""
        with self._changed:
            if order := self._orders.get(copy_id):
                order.urgent = True

    def cancel(self, copy_id: int) -> bool:
        with self._changed:
            order = self._orders.get(copy_id)
            may_drop = order is not None and not order.begun
            if may_drop:
                del self._orders[copy_id]
        return may_drop

    def drain(self) -> list[Copied]:
        return [self._ended.get_nowait() for _ in range(self._ended.qsize())]

    def finish(self) -> None:
        """Wait until all that was submitted has ended, and nothing more is read or written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._orders or self._closed.is_set())

    def close(self) -> None:
        """End the thread after the piece under way. Idempotent."""
        with self._changed:
            is_first = not self._closed.is_set()
            self._closed.set()
            self._changed.notify()
        self._thread.join()
        for host, _ in self._pools if self._cuda and is_first else ():  # an error of CUDA's fails the next launch
            torch.cuda.cudart().cudaHostUnregister(host.data_ptr())

    def _now(self) -> torch.cuda.Event | None:
        return torch.cuda.current_stream(self._stream.device).record_event() if self._stream else None

    # the copier's thread --------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._orders or self._closed.is_set())
                if self._closed.is_set():
                    return
                order = min(self._orders.values(), key=lambda order: order.rank)
                order.begun = True
            if copied := self._advance(order):
                with self._changed:
                    del self._orders[copied.copy_id]
                    self._ended.put(copied)
                    self._changed.notify_all()
                self._on_copied()

    def _advance(self, order: _Order) -> Copied | None:
        """Copy the next piece. Returns the end of the copy where that was its last one."""
        piece = slice(order.done, order.done + self._piece)
        try:
            if order.after:  # no time of the copy's: a pass may be under way
                order.after.synchronize()
            began = time.perf_counter()
            self._copy(order, piece)
        except Exception:  # whatever a driver raises: the cache counts it and computes the blocks
            logger.exception("copy %s failed", order.copy.copy_id)
            return Copied(order.copy.copy_id, ok=False)
        order.done = min(piece.stop, len(order.copy.sources))
        throttled = began + self._throttle * (order.done - piece.start)
        self._closed.wait(max(0.0, throttled - time.perf_counter()))
        order.seconds += time.perf_counter() - began
        is_whole = order.done == len(order.copy.sources)
        return Copied(order.copy.copy_id, True, order.seconds) if is_whole else None

    def _copy(self, order: _Order, piece: slice) -> None:
        """Copy a piece. Returns once the target holds the data."""
        runs = block_runs(order.copy.sources[piece], order.copy.targets[piece])
        is_load = order.copy.direction is Direction.LOAD
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            for host, device in self._pools:
                source, target = (host, device) if is_load else (device, host)
                copy_slots = _copy_by_layer if self._cuda else _copy_on_one_thread
                for first, to, count in runs:
                    size = count * self._block_size
                    a, b = first * self._block_size, to * self._block_size
                    copy_slots(source[:, a : a + size], target[:, b : b + size])
        if self._stream:
            self._stream.synchronize()


def block_runs(sources: tuple[int, ...], targets: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Return pairs of blocks as runs (first source, first target, count) of neighbours on both sides."""
    runs: list[tuple[int, int, int]] = []
    for source, target in zip(sources, targets, strict=True):
        if runs and (source, target) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            first, to, count = runs.pop()
            runs.append((first, to, count + 1))
        else:
            runs.append((source, target, 1))
    return runs


def _copy_by_layer(source: Tensor, target: Tensor) -> None:
    """Copy layer by layer: each run is contiguous, so it moves without a buffer. Does not wait for its end."""
    for a, b in zip(source, target, strict=True):
        b.copy_(a, non_blocking=True)


def _copy_on_one_thread(source: Tensor, target: Tensor) -> None:
    """Copy all layers at once, as bytes, since NumPy has no bfloat16. It copies on the calling thread, where PyTorch
    would take all cores.
    """
    target.view(torch.uint8).numpy()[...] = source.view(torch.uint8).numpy()
