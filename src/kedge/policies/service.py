"""The order of service among waiting requests: what is cached first, with ageing and a bound on how long any waits.

Under overload, when the contexts of the live sessions do not fit into the cache, first come, first served makes all
sessions take turns: each finds its KV evicted, and every turn computes a whole history. Here a request's place is its
number in the order of arrival plus a slack in proportion to the share of its prompt that would have to be computed.
So whose KV is cached goes on, and a session that was evicted gets in once for several turns of the others; then its
own next turns find it cached, and they repay its prefill. How many sessions are active at once needs no other cap:
of `1 + PATIENCE` admissions about one brings a session back.

Without overload requests are served in the order of arrival.

Beside that stands a cap on active runs (`may_start`).
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kedge.errors import PlanError
from kedge.policies.sessions.turns import MAX_SESSIONS, RECENT
from kedge.structures.bounded import BoundedDict

PATIENCE = 4.0
"""Later arrivals, for each request that waits, that may go before one whose whole prompt has to be computed."""
LOAD_SHARE = 0.1
"""Cost of loading a token from the host, as a share of the cost of computing it."""
LOOK_UP_TOKENS = 16_384
"""Tokens of prompts that one call of `ServiceOrder.order` looks up, beside the prompt of the request that is first."""
IDLE_SECONDS = 120.0
"""Seconds for which the context of a session without a request counts as live."""
T = TypeVar("T", bound=Hashable)


def missing_share(total: float, on_device: float, on_host: float = 0) -> float:
    """Return the share of a prompt of `total` tokens (or blocks) that has to be computed, from 0 to 1. A loaded token
    costs a part of a computed one.
    """
    computed = total - on_device - on_host
    return max(0.0, min(1.0, (computed + LOAD_SHARE * on_host) / max(1.0, total)))


class LiveContexts:
    """The tokens that the live sessions' contexts need together: sessions with a request that waits or runs, and those
    that have been idle for less than `idle_seconds`. O(1) amortised per call.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        idle_seconds: float = IDLE_SECONDS,
        limit: int = MAX_SESSIONS,
    ) -> None:
        """Begin without requests. `clock` is in seconds; at most `limit` idle sessions count."""
        self._clock, self._idle_seconds = clock, idle_seconds
        self._began: dict[Hashable, tuple[Hashable, int]] = {}
        """The requests in the engine, each with its session and the tokens with which it began"""
        self._busy: dict[Hashable, list[int]] = {}
        """The tokens of the requests of each session"""
        self._idle: BoundedDict[Hashable, tuple[float, int]] = BoundedDict(limit, lambda _, one: self._add(-one[1]))
        """When a session's last request ended, and its tokens; in order of time"""
        self._tokens = 0

    def __len__(self) -> int:
        """Return how many requests have begun and not ended."""
        return len(self._began)

    def began(self, request: Hashable, session: Hashable | None, tokens: int) -> None:
        """Count a request of `tokens` tokens that has arrived; one that has begun is ignored."""
        if request in self._began:
            return
        context = request if session is None else session
        self._began[request] = context, tokens
        self._add(-self._idle.pop(context, (0.0, 0))[1])
        requests = self._busy.setdefault(context, [])
        self._add(max(0, tokens - max(requests, default=0)))
        requests.append(tokens)

    def ended(self, request: Hashable, tokens: int) -> None:
        """Count a request as over that has `tokens` tokens now; one that has not begun is ignored. A session without
        other requests is idle then; a request without a session cannot be continued.
        """
        session, began_with = self._began.pop(request, (None, 0))
        if session is None:
            return
        requests = self._busy[session]
        before = max(requests)
        requests.remove(began_with)
        self._add(max(requests, default=0) - before)
        if not requests:
            del self._busy[session]
            if session != request:
                self._add(tokens)
                self._idle[session] = self._clock(), tokens

    def tokens(self) -> int:
        """Return the tokens of all live contexts."""
        while self._idle and self._clock() - next(iter(self._idle.values()))[0] >= self._idle_seconds:
            self._add(-self._idle.popitem(last=False)[1][1])
        return self._tokens

    def check_integrity(self) -> None:
        """Raise `PlanError` unless the sum is that of the contexts."""
        busy = sum(max(requests) for requests in self._busy.values())
        idle = sum(tokens for _, tokens in self._idle.values())
        if busy + idle != self._tokens or self._busy.keys() & self._idle.keys():
            raise PlanError("tokens", self._tokens, f"{busy} are busy and {idle} idle")

    def _add(self, tokens: int) -> None:
        self._tokens += tokens


@dataclass(slots=True)
class _Place:
    """A waiting item: its number in the order of arrival, its tokens, whether it goes before all ordinary ones, and its
    share to compute as of a version.
    """

    arrival: int
    tokens: int
    is_first: bool = False
    missing: float = 1.0
    version: int | None = None


class ServiceOrder(Generic[T]):
    """The waiting items of one queue in the order of service.

    Bound: whatever look-ups answer, at most `patience * n` later arrivals pass an item, where n is the greatest number
    of items that waited together with it. Items that are pushed as first come on top.
    """

    def __init__(self, look_up: Callable[[T], float], patience: float = PATIENCE) -> None:
        """Start empty. `look_up` returns the share of an item's tokens that would have to be computed now."""
        self._look_up, self._patience = look_up, patience
        self._places: OrderedDict[T, _Place] = OrderedDict()
        """Items whose look-up is oldest first"""
        self._arrivals, self._overloaded = 0, False
        self._in_order: list[T] | None = []
        self._settled_for: tuple[int, bool] | None = None
        """The version and the load for which every look-up is new"""

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: object) -> bool:
        return item in self._places

    def missing(self, item: T) -> float:
        """Return the share of a waiting item that would have to be computed, as of its last look-up."""
        return self._places[item].missing

    def push(self, item: T, tokens: int, *, is_first: bool = False) -> None:
        """Add an item with a prompt of `tokens` tokens, before all others if it `is_first`. O(1). Raises `PlanError`
        for a duplicate.
        """
        if item in self._places:
            raise PlanError("item", item, "waits already")
        self._arrivals += 1
        self._places[item] = _Place(self._arrivals, tokens, is_first)
        self._places.move_to_end(item, last=False)
        if self._in_order is None or is_first or self._overloaded:
            self._in_order = None
        else:  # in the order of arrival the newest is last: to sort thousands again would take as long as a step
            self._in_order.append(item)
        self._settled_for = None

    def remove(self, item: T) -> None:
        """Remove an item that is admitted, or was withdrawn. Raises `PlanError` for an item that does not wait."""
        if item not in self._places:
            raise PlanError("item", item, "does not wait")
        del self._places[item]
        if self._in_order is None or self._overloaded:
            self._in_order = None
        else:
            self._in_order.remove(item)
        self._settled_for = None

    def order(self, version: int, overloaded: bool) -> list[T]:
        """Return the items, next first; the caller does not change the list.

        `version` is a number that grows whenever the answers of `look_up` may have changed. Look-ups cost at most
        `LOOK_UP_TOKENS` tokens and two prompts; other answers may be as old as that makes them. O(n log n) with n items
        where something has changed, else O(1).
        """
        if self._settled_for == (version, overloaded):
            return self.in_order
        if overloaded or self._overloaded:
            self._in_order = None
        left, self._overloaded = LOOK_UP_TOKENS, overloaded

        def look(item: T) -> None:
            place = self._places[item]
            place.missing, place.version = max(0.0, min(1.0, self._look_up(item))), version
            self._places.move_to_end(item)
            self._in_order = None

        for item, place in tuple(self._places.items()) if overloaded else ():  # the oldest look-ups first
            if left <= 0 or place.version == version:
                break
            look(item)
            left -= place.tokens
        for first in self.in_order[:1] if overloaded else ():  # it is what is going to be admitted
            if self._places[first].version != version:
                look(first)
        settled = not overloaded or all(place.version == version for place in self._places.values())
        self._settled_for = (version, overloaded) if settled else None
        return self.in_order

    @property
    def in_order(self) -> list[T]:
        """The items, next first, by the last look-ups; the caller does not change the list."""
        if self._in_order is None:
            slack = self._patience * len(self._places) if self._overloaded else 0.0
            ranks = (
                (not one.is_first, one.arrival + slack * one.missing, one.arrival, item)
                for item, one in self._places.items()
            )
            self._in_order = [item for *_, item in sorted(ranks)]
        return self._in_order


ACTIVE_SHARE = 0.25
"""Share of the cache that running requests may hold when another cold prompt starts."""
MOST = 0.5
"""Share of a prompt that has to be computed, from which on it is cold; and share of requests that sessions come back
with, from which on cold prompts are held back."""
WAIT_SHARE = 0.5
"""Longest time to write an answer, as a share of the time to compute the prompt that waits for it."""
GROWTH = 1.02
"""Growth of a shortest time with every observation, so that it follows what changes."""


class StepTimes:
    """What steps of an engine take at least: to decode, and to compute a token of a prompt. In seconds."""

    def __init__(self) -> None:
        self.decode = self.per_token = math.inf
        """A step of decodes alone; a prompt's token"""
        self.answer = 0.0
        """Mean tokens of an answer"""

    def step(self, tokens: int, requests: int, seconds: float) -> None:
        """Take a step that computed so many tokens of so many requests. Time in which nothing ran may be in it."""
        if tokens <= requests:
            self.decode = min(GROWTH * self.decode, seconds)
        else:
            self.per_token = min(GROWTH * self.per_token, seconds / tokens)

    @property
    def are_known(self) -> bool:
        """Whether steps of both kinds have been seen."""
        return math.isfinite(self.decode) and math.isfinite(self.per_token)

    def answered(self, tokens: int) -> None:
        """Take the length of an answer."""
        self.answer += (tokens - self.answer) * (RECENT if self.answer else 1.0)


def may_start(tokens: int, missing: float, running: int, capacity: int, returning: float, times: StepTimes) -> bool:
    """Return whether a prompt of `tokens` tokens may start beside running requests of `running` tokens, while the live
    contexts do not fit a cache of `capacity` tokens.

    A share `missing` of it has to be computed; with a share `returning` of all requests a session comes back.

    A prompt that has to be computed slows down all answers that are written beside it. Where one such prompt follows
    the other, answers take so long that running requests hold the whole cache: no session finds its KV when it comes
    back, and every turn computes a whole history. So under overload a cold prompt starts only while running requests
    hold a small part of the cache. Prompts whose KV is cached start at any time, and where nothing runs, everything
    does. Nothing is computed while a cold prompt waits for the answers of others. So it waits only where answers are
    short against prompts, by the measured times of steps, and where most requests continue a session.
    """
    if not running or missing < MOST or returning < MOST or not times.are_known:
        return True
    if times.decode * times.answer > WAIT_SHARE * times.per_token * int(missing * tokens):
        return True
    return running + tokens <= ACTIVE_SHARE * capacity
