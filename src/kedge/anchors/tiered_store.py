"""Where anchors and base KV lie: on the device within one bound, and behind it in host memory within another.

What moves as a whole is a *unit*: the offsets of one site, the base KV of one value or template. Who goes first says
the policy that also evicts blocks; a unit that a plan is about to read stays. All copies are made by the thread that
asks: the offsets of the agents that run next are fetched in its spare time, so that a demand is the exception.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Protocol

import torch
from torch import Tensor

from kedge.errors import PlanError
from kedge.reuse.contracts import Owner
from kedge.types import Namespace, TenantId


@dataclass(frozen=True, slots=True)
class View:
    """A unit as a policy sees it (`kedge.policies.eviction.NodeView`)."""

    namespace: Namespace
    last_access: int
    size: int
    """Bytes"""
    step: float | None
    """Fewest steps until its owner can run; `inf`: unknown; None: no forecast has told"""
    varying: bool = False

    def prefix(self) -> bytes:
        return b""


class Policy(Protocol):
    """Of all units that may go the least key goes first."""

    def __call__(self, node: View, /) -> tuple[float, ...]: ...


def recency(node: View) -> tuple[float, ...]:
    """Least recently used first."""
    return (node.last_access,)


class Offloadable:
    """What moves as a whole. Subclasses say what it weighs and put its tensors elsewhere."""

    owner: Owner | None = None
    home = torch.device("cpu")
    """Where it comes back to."""
    last_access = 0
    on_host = False
    pinned = False
    """A plan is about to read it."""
    prefetched = False
    """It was fetched ahead, and nobody has asked for it since."""

    @property
    def nbytes(self) -> int:
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        raise NotImplementedError

    def place(self, put: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by what `put` makes of it."""
        raise NotImplementedError


@dataclass(slots=True)
class TieredStoreStats:
    """What has moved since the start, and what is where now."""

    device_bytes: int = 0
    host_bytes: int = 0
    host_units: int = 0
    offloaded: int = 0
    """Units that were moved to the host, once for every time."""
    demanded: int = 0
    """Units that a request had to fetch from the host itself."""
    completed: int = 0
    """Units that were fetched ahead and then asked for."""
    wasted: int = 0
    """Units that were fetched ahead and moved back before anybody asked."""
    bytes_offloaded: int = 0
    bytes_loaded: int = 0
    demand_s: float = 0.0
    """Seconds that requests waited for what they fetched themselves."""


@dataclass(frozen=True, slots=True)
class HostBound:
    """Host memory behind a store, and how it is used. Without bytes nothing moves."""

    nbytes: int = 0
    policy: Policy = recency
    steps: Callable[[Owner], float | None] = lambda _: None
    window: float = 2.0
    """Units whose owner runs within so many steps are fetched ahead. Below 0: none."""
    virtual_step: float = 8.0
    """The step at which owners that no forecast knows compete."""


NO_HOST = HostBound()


class TieredStore:
    """Moves a store's units between device and host. The store owns the units."""

    def __init__(
        self,
        device_bytes: int,
        host: HostBound,
        units: Callable[[], Iterable[Offloadable]],
        beside: Callable[[], int] = lambda: 0,
    ) -> None:
        """`units` are those of the store now, `beside` the bytes on the device that belong to none of them."""
        self._device_bytes, self._host, self._units, self._beside = device_bytes, host, units, beside
        self._stats = TieredStoreStats()
        self._clock = count(1)
        self.due = False
        """Whether `fetch` may have something to do."""

    @property
    def host_bytes(self) -> int:
        """Bytes on the host now."""
        return sum(unit.nbytes for unit in self._units() if unit.on_host)

    @property
    def device_bytes(self) -> int:
        """Bytes on the device now."""
        return self._beside() + sum(unit.nbytes for unit in self._units() if not unit.on_host)

    def settle(self, total: int) -> int:
        """Move to the host what of a store of `total` bytes does not fit the device, as far as the host has room; the
        bytes that still do not.
        """
        excess, on_host = total - self._device_bytes, 0
        if excess > 0 and self._host.nbytes:
            on_host = self.host_bytes
            excess -= on_host
        while excess > 0 and (victim := self._victim(self._units(), on_host)):
            self._offload(victim)
            excess, on_host = excess - victim.nbytes, on_host + victim.nbytes
        return max(0, excess)

    def touch(self, unit: Offloadable) -> None:
        """A request has just made `unit`, or asks for it."""
        unit.last_access = next(self._clock)
        self._stats.completed += unit.prefetched
        unit.prefetched = False

    def demand(self, unit: Offloadable) -> bool:
        """See to it that `unit` is on the device, for a request; False where it finds no room."""
        if unit.on_host:
            began = time.perf_counter()
            if not self._load(unit, lambda _: True):
                return False
            self._stats.demanded += 1
            self._stats.demand_s += time.perf_counter() - began
        self.touch(unit)
        return True

    def notice(self) -> None:
        """The forecast has changed: something may be worth fetching."""
        self.due = self._host.nbytes > 0

    def fetch(self) -> bool:
        """Bring one unit whose owner runs soon, the soonest, in the place of such whose owners run strictly later.

        False, and nothing is due any more, where there is none.
        """
        near = [unit for unit in self._units() if unit.on_host and self._step(unit) <= self._host.window]
        for unit in sorted(near, key=self._step):
            if self._load(unit, self._later_than(self._step(unit))):
                unit.prefetched = True
                return True
        self.due = False
        return False

    def stats(self) -> TieredStoreStats:
        """Return a snapshot."""
        units = sum(unit.on_host for unit in self._units())
        return replace(self._stats, device_bytes=self.device_bytes, host_bytes=self.host_bytes, host_units=units)

    def check_integrity(self) -> None:
        """Raise `PlanError` where more lies on the host than may, or what is pinned lies there."""
        if self.host_bytes > self._host.nbytes:
            raise PlanError("host_bytes", self.host_bytes, f"{self._host.nbytes} are allowed")
        if any(unit.on_host and (unit.pinned or unit.prefetched) for unit in self._units()):
            raise PlanError("on_host", True, "of a unit that a plan reads, or that was fetched")

    def _load(self, unit: Offloadable, may_go: Callable[[Offloadable], bool]) -> bool:
        """Bring `unit` to the device. Those that make room for it may take its place on the host; if that is not
        enough, nothing moves.
        """
        short, on_host = self.device_bytes + unit.nbytes - self._device_bytes, self.host_bytes - unit.nbytes
        left = [one for one in self._units() if may_go(one)]
        going: list[Offloadable] = []
        while short > 0:
            victim = self._victim(left, on_host)
            if victim is None:
                return False
            left.remove(victim)
            going.append(victim)
            short, on_host = short - victim.nbytes, on_host + victim.nbytes
        for victim in going:
            self._offload(victim)
        unit.place(partial(_copy_to, unit.home))
        unit.on_host = False
        self._stats.bytes_loaded += unit.nbytes
        return True

    def _victim(self, units: Iterable[Offloadable], on_host: int) -> Offloadable | None:
        """Who goes to the host next, where `on_host` bytes are there already."""
        room = self._host.nbytes - on_host
        may = (unit for unit in units if not (unit.on_host or unit.pinned) and 0 < unit.nbytes <= room)
        return min(may, key=self._key, default=None)

    def _offload(self, unit: Offloadable) -> None:
        self._stats.wasted += unit.prefetched
        unit.prefetched = False
        unit.home = unit.device
        unit.place(_copy_to_host)
        unit.on_host = True
        self._stats.offloaded += 1
        self._stats.bytes_offloaded += unit.nbytes

    def _key(self, unit: Offloadable) -> tuple[float, ...]:
        namespace = unit.owner.namespace if unit.owner else Namespace(TenantId(""))
        return self._host.policy(View(namespace, unit.last_access, unit.nbytes, self._told(unit)))

    def _told(self, unit: Offloadable) -> float | None:
        return self._host.steps(unit.owner) if unit.owner else None

    def _step(self, unit: Offloadable) -> float:
        told = self._told(unit)
        return self._host.virtual_step if told is None else told

    def _later_than(self, step: float) -> Callable[[Offloadable], bool]:
        return lambda unit: self._step(unit) > step


def _copy_to_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory: pinned where the device is a GPU, which then fetches it on its own time."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor)


def _copy_to(device: torch.device, tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device=device).copy_(tensor, non_blocking=True)
