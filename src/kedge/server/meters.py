"""Rate limits and room for requests in flight, per tenant. Only the event loop's thread uses them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kedge.errors import LimitReached, RequestError
from kedge.settings import LimitSettings

MINUTE = 60.0


@dataclass
class Bucket:
    """Token bucket: `rate` per minute, of which a minute's worth may be used at once."""

    key: str
    """Name of the limit."""
    rate: int | None
    """None for no limit."""
    clock: Callable[[], float] = time.monotonic
    level: float = field(init=False)
    """What is left; below zero if the last use took more than was left."""
    filled_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.level = float(self.rate or math.inf)
        self.filled_at = self.clock()

    def require(self) -> None:
        """Raise `LimitReached` while nothing is left."""
        self._refill()
        if self.rate is not None and self.level <= 0:
            error = LimitReached(self.key, self.rate, "are used up for now")
            error.retry_after = (1 - self.level) * MINUTE / self.rate
            raise error

    def use(self, count: int) -> None:
        """Take `count` out of the bucket."""
        self._refill()
        self.level -= count

    def _refill(self) -> None:
        now = self.clock()
        if self.rate is not None:
            self.level = min(float(self.rate), self.level + (now - self.filled_at) * self.rate / MINUTE)
        self.filled_at = now


@dataclass
class Meter:
    """Requests in flight and rate limits of one tenant."""

    limits: LimitSettings
    clock: Callable[[], float] = time.monotonic
    in_flight: int = 0
    tokens: Bucket = field(init=False)
    hints: Bucket = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = Bucket("tokens_per_minute", self.limits.tokens_per_minute, self.clock)
        self.hints = Bucket("hints_per_minute", self.limits.hints_per_minute, self.clock)

    def admit(self, count: int) -> Ticket:
        """Reserve room for `count` generations.

        Raises `LimitReached`, or `RequestError` for more than may ever run at once.
        """
        most = self.limits.requests_in_flight
        if count > most:
            raise RequestError("n", count, f"at most {most} generations at once are allowed")
        self.tokens.require()
        if self.in_flight + count > most:
            raise LimitReached("requests_in_flight", self.in_flight, f"at most {most} at once are allowed")
        self.in_flight += count
        return Ticket(self, count)


@dataclass(eq=False)
class Ticket:
    """Room that was reserved for a call."""

    meter: Meter
    count: int

    def give_back_one(self) -> None:
        """Free the room of one generation."""
        self.meter.in_flight -= 1
        self.count -= 1

    def release(self) -> None:
        """Free the room that is left. Idempotent."""
        self.meter.in_flight -= self.count
        self.count = 0
