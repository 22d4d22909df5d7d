"""The tiers of anchors and base KV: the device within one bound, and host memory behind it within another.

A *unit* moves as a whole: the offsets of one site, or the base KV of one value or template. The policy that evicts
blocks also chooses units; a unit that a plan is about to read stays. All copies are made by the calling thread; the
offsets of the agents that run next are fetched in its spare time, so that a fetch on demand is the exception.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import torch
from torch import Tensor

from kedge.errors import PlanError
from kedge.policies.eviction import EvictionKey, StepPolicy, lru
from kedge.reuse.contracts import Owner


@dataclass(frozen=True, slots=True)
class View:
    """A unit as a policy sees it."""

    last_access: int
    step: float | None
    """Fewest steps until its owner can run; `inf` if unknown; None without a forecast."""
    varying: bool = False


class Offloadable:
    """Tensors that move between tiers as a whole. Subclasses give their size and replace their tensors."""

    owner: Owner | None = None
    home = torch.device("cpu")
    """The device that it belongs to."""
    last_access = 0
    on_host = False
    pinned = False
    """Whether a plan is about to read it."""
    prefetched = False
    """Whether it was fetched ahead and not requested since."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, wherever it is."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """The device that its tensors are on."""
        raise NotImplementedError

    def place(self, put: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by the result of `put` on it."""
        raise NotImplementedError


@dataclass(slots=True)
class TieredStoreStats:
    """Figures of moves since the start, and of what is in each tier now."""

    device_bytes: int = 0
    host_bytes: int = 0
    host_units: int = 0
    offloaded: int = 0
    """Moves of units to the host."""
    demanded: int = 0
    """Units fetched from the host on a request's demand."""
    completed: int = 0
    """Units fetched ahead and requested later."""
    wasted: int = 0
    """Units fetched ahead and moved back without a request."""
    bytes_offloaded: int = 0
    bytes_loaded: int = 0
    demand_s: float = 0.0
    """Seconds that requests waited for fetches on demand."""


@dataclass(frozen=True, slots=True)
class HostBound:
    """The host memory of a store, and how it is used. With 0 bytes nothing moves."""

    nbytes: int = 0
    policy: StepPolicy = lru
    steps: Callable[[Owner], float | None] = lambda _: None
    window: float = 2.0
    """Units with an owner that runs within this many steps are fetched ahead. Below 0: none."""
    virtual_step: float = 8.0
    """The number of steps assumed for owners without a forecast."""


NO_HOST = HostBound()


class TieredStore:
    """The mover of a store's units between device and host. The store owns the units."""

    def __init__(
        self,
        device_bytes: int,
        host: HostBound,
        units: Callable[[], Iterable[Offloadable]],
        beside: Callable[[], int] = lambda: 0,
    ) -> None:
        """Start without moves. `units` returns the store's units now, `beside` the device bytes outside of any unit."""
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
        """Move what does not fit the device of a store of `total` bytes to the host, as far as that has room. Returns
        the bytes that still do not fit.
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
        """Mark `unit` as just used or made by a request."""
        unit.last_access = next(self._clock)
        self._stats.completed += unit.prefetched
        unit.prefetched = False

    def demand(self, unit: Offloadable) -> bool:
        """Bring `unit` to the device for a request. Returns False if there is no room."""
        if unit.on_host:
            began = time.perf_counter()
            if not self._load(unit):
                return False
            self._stats.demanded += 1
            self._stats.demand_s += time.perf_counter() - began
        self.touch(unit)
        return True

    def notice(self) -> None:
        """Take note that the forecast has changed, so that fetching may pay."""
        self.due = self._host.nbytes > 0

    def fetch(self) -> bool:
        """Fetch the unit whose owner runs soonest, in place of units whose owners run strictly later.

        Returns False if there is none; then nothing is due any more.
        """
        near = [unit for unit in self._units() if unit.on_host and self._step(unit) <= self._host.window]
        for unit in sorted(near, key=self._step):
            if self._load(unit, self._step(unit)):
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

    def _load(self, unit: Offloadable, step: float = -math.inf) -> bool:
        """Bring `unit` to the device. Units of later steps that make room for it may take its place on the host; if
        that is not enough, nothing moves.
        """
        short, on_host = self.device_bytes + unit.nbytes - self._device_bytes, self.host_bytes - unit.nbytes
        left = [one for one in self._units() if self._step(one) > step]
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
        """Return the unit that goes to the host next, given `on_host` bytes there already."""
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

    def _key(self, unit: Offloadable) -> EvictionKey:
        return self._host.policy(View(unit.last_access, self._forecast_step(unit)))

    def _forecast_step(self, unit: Offloadable) -> float | None:
        return self._host.steps(unit.owner) if unit.owner else None

    def _step(self, unit: Offloadable) -> float:
        step = self._forecast_step(unit)
        return self._host.virtual_step if step is None else step


def _copy_to_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, pinned if the device is a GPU, so that it can fetch asynchronously."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor)


def _copy_to(device: torch.device, tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device=device).copy_(tensor, non_blocking=True)
