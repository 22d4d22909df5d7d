"""Continuous batching: the choice of sequences and positions for the next pass, and the order in which every tenant's
waiting requests are served, by the cached shares of their prompts.
"""

import heapq
import math
import sys
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from kedge.cache import CacheManager
from kedge.engine.common.logprobs import LOGIT_ROWS
from kedge.engine.local.sequence import BaseJob, PreparedPrompt, RequestSequence, Sequence, Work
from kedge.engine.local.sessions import SessionCaching
from kedge.policies.service import LiveContexts, ServiceOrder, missing_share
from kedge.reuse.costs import LEARNING_SHARE, EngineCosts
from kedge.structures.bounded import BoundedDict
from kedge.types import TenantId

T = TypeVar("T", bound=Hashable)
JOB_CHUNK = 256
"""Tokens of base prefills in a pass while no request waits; they delay decodes, or a new request, by no more
than this.
"""
FEW = 64
"""Tokens up to which a prefill is short: it goes before base prefills, as it belongs to a translated prompt and ends
soon, and mostly the fixed cost of its pass is paid.
"""
AHEAD_CHUNK = 32
"""Tokens computed ahead of requests in one pass."""
Allowances = dict[TenantId, float]
"""Seconds that each tenant's work may still add to a pass"""


class _Waiting(NamedTuple):
    """Whose a waiting item is, what it costs, and its arrival number."""

    tenant: TenantId
    cost: float
    arrival: int


class FairQueue(Generic[T]):
    """The waiting items of many tenants: fair by tokens, and within a tenant in a `ServiceOrder`: by arrival, unless
    `arrange` says that the device is overloaded. Items are hashable and distinct.

    Every tenant has a virtual counter of the tokens that it received, and the tenant with the least counter is next
    (VTC: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). A returning tenant is lifted to the
    least counter of waiting tenants, so that idle time earns no credit. Not thread-safe.
    """

    def __init__(self, look_up: Callable[[T], float] = lambda _: 1.0) -> None:
        """`look_up` returns the share of an item's tokens that would have to be computed now."""
        self._look_up = look_up
        self._queues: dict[TenantId, ServiceOrder[T]] = {}
        """Of tenants with waiting items"""
        self._waiting: dict[T, _Waiting] = {}
        self._arranged: dict[TenantId, list[T]] = {}
        self._counters: BoundedDict[TenantId, float] = BoundedDict()
        """Of all tenants, also without waiting items"""
        self._last = TenantId("")
        """The tenant that left last; its counter is the level for newcomers while no item waits"""
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, item: object) -> bool:
        return item in self._waiting

    def __iter__(self) -> Iterator[T]:
        """Iterate over the items in the order of service, if each costs what it was pushed with and none comes.

        O(n log tenants) for all n items, and lazy: the first few cost little. The queue must not change meanwhile.
        """
        return (item for *_, item in heapq.merge(*map(self._ranked, self._queues)))

    def unordered(self) -> list[T]:
        """Return the items in any order, which takes a fraction of the time."""
        return list(self._waiting)

    def heads(self) -> list[T]:
        """Return the next item of every tenant, in the order of service. O(tenants log tenants)."""
        return [item for *_, item in sorted(next(self._ranked(tenant)) for tenant in self._queues)]

    def push(self, item: T, tenant: TenantId, cost: int, *, is_first: bool = False) -> None:
        """Add an item that does not wait yet, and will cost about `cost` tokens (above 0), before all others of its
        tenant if it `is_first`. O(1), or O(tenants) if its tenant was idle.
        """
        if tenant not in self._queues:
            self._counters[tenant] = max(self._counter(tenant), self._least())
            self._queues[tenant] = ServiceOrder(self._look_up)
        self._queues[tenant].push(item, cost, is_first=is_first)
        self._waiting[item] = _Waiting(tenant, cost, next(self._arrivals))

    def take(self, item: T, *, is_served: bool = True) -> None:
        """Remove an item, and charge its tenant the item's cost if it is served."""
        tenant, cost, _ = self._waiting.pop(item)
        if is_served:
            self.charge(tenant, cost)
        self._queues[tenant].remove(item)
        if not self._queues[tenant]:
            del self._queues[tenant]
            self._last = tenant

    def arrange(self, version: int, overloaded: bool) -> bool:
        """Look up what waiting items would cost, while the device is `overloaded`, and put every tenant's in their
        order, see `ServiceOrder.order`. Returns whether any of them is another one now.
        """
        orders = {tenant: queue.order(version, overloaded) for tenant, queue in self._queues.items()}
        before, self._arranged = self._arranged, orders if overloaded else {}  # else they are lists that change
        return orders != before

    def charge(self, tenant: TenantId, tokens: float) -> None:
        """Charge a tenant for service beyond `take`, such as the tokens of an answer."""
        self._counters[tenant] = self._counters.get(tenant, self._least()) + tokens

    def _ranked(self, tenant: TenantId) -> Iterator[tuple[float, float, int, T]]:
        """Yield a tenant's items in order, each with its rank once those before it were served, least first: of equal
        counters the cheaper item, then the older one.
        """
        counter = self._counter(tenant)
        for item in self._queues[tenant].in_order:
            _, cost, arrival = self._waiting[item]
            yield counter, cost, arrival, item
            counter += cost

    def _least(self) -> float:
        """Return the least counter of tenants that wait, to which newcomers are lifted."""
        return min(map(self._counter, self._queues or (self._last,)))

    def _counter(self, tenant: TenantId) -> float:
        return self._counters.get(tenant, 0.0)


class CachedFirst:
    """Lets requests with cached prompts go first, while the live contexts do not fit the device: tells
    `FairQueue.arrange` what it has to know, and protects the KV of waiting requests by their places.
    """

    def __init__(self, cache: CacheManager, sessions: SessionCaching) -> None:
        self._cache, self._sessions = cache, sessions
        self._capacity = cache.num_blocks * cache.block_size
        self.live = LiveContexts()

    def arrange(self, queue: FairQueue[RequestSequence]) -> None:
        """Arrange the waiting requests of every tenant, and protect them by their places where that matters. O(tenants
        that wait) where nothing has changed.
        """
        overloaded = self.live.tokens() > self._capacity
        if queue.arrange(self._cache.version, overloaded) and overloaded:
            self._sessions.ledger.waiting([one.turn for one in queue if one.turn])

    def missing(self, sequence: RequestSequence) -> float:
        """Return the share of a prompt that would have to be computed; translation is not foreseen."""
        total = len(sequence.tokens)
        if (prepared := sequence.preparation) and prepared.admitted:
            return missing_share(total, prepared.ready)
        status = self._cache.status(sequence.namespace, sequence.tokens[: sequence.exact_limit])
        return missing_share(total, status.device_tokens, status.host_tokens)


@dataclass(slots=True)
class _Pass:
    """The next pass while it is filled."""

    left: int
    """Tokens that still fit"""
    rows: int
    """Rows of logits of whole prompts that still fit"""
    reach: float
    """Context over which attending takes as long as all else that a token takes: it counts as two then"""
    costs: EngineCosts
    allowed: Allowances | None
    """None where only one tenant runs"""
    work: list[Work] = field(default_factory=list)

    def add(self, sequence: Sequence, most: int = sys.maxsize) -> int:
        """Add up to `most` positions of a sequence within its tenant's allowance. Returns their number."""
        seconds = None if self.allowed is None else self.allowed.get(sequence.tenant, 0.0)
        if seconds is not None:  # at least one token while any time is left
            within = self.costs.tokens_within(seconds - self.costs.added_seconds(0, 1), len(sequence.todo))
            most = min(most, max(1, within) if seconds > 0 else 0)
        each = 1 + sequence.todo[0] / self.reach if sequence.todo else 1
        most = min(most, int(self.left / each), self.rows if sequence.needs_all_logits else sys.maxsize)
        positions = sequence.todo[: max(0, most)]
        if positions:
            self.work.append(Work(sequence, positions))
            if self.allowed is not None:
                self.allowed[sequence.tenant] -= self.costs.added_seconds(len(positions), 1)
        self.left -= math.ceil(each * len(positions))
        self.rows -= len(positions) if sequence.needs_all_logits else 0
        return len(positions)


class Scheduler:
    """Fair between tenants and in the order of `service` within one (without it, of arrival), in chunks of at most
    `max_batch_tokens` a pass.

    Decoding sequences go first (one token each), then prefills that have begun, then new requests. Base prefills take
    at most `LEARNING_SHARE` of a pass while requests wait for their first token. Prompts that are assembled ahead come
    only when none does, in small pieces; beside decodes only the few tokens that a translated one needs, and only
    beside few: these wait for what the request is spared.

    Where several tenants run, each may take as much of a pass as the least demanding of them would take for itself
    (max-min fairness by time), and a tenant with nothing running is admitted beyond `max_running`, up to twice as many.
    So a tenant never waits behind more of another's backlog than its share.

    A request whose KV is being loaded steps aside, and others go before it (KVFlow: status-aware scheduling). Once it
    is ready it goes before all that hold no blocks. At most `max_running` step aside at once, which bounds overtaking.
    """

    def __init__(
        self,
        admit: Callable[[Sequence], bool],
        is_ready: Callable[[RequestSequence], bool],
        costs: EngineCosts,
        max_batch_tokens: int,
        max_running: int,
        jobs: deque[BaseJob],
        ahead: deque[PreparedPrompt],
        running: list[RequestSequence],
        service: CachedFirst | None = None,
        reach: float = math.inf,
    ) -> None:
        """Start with empty queues. `admit` finds room for a sequence, `is_ready` says whether to admit a request now.
        `jobs` and `ahead` are filled by others, `running` is only looked at by them.
        """
        self._service, self._reach = service, reach
        self._admit, self._is_ready, self._costs = admit, is_ready, costs
        self._budget, self._max_running = max_batch_tokens, max_running
        self.passes = 0
        """Number of calls of `schedule`."""
        self.waiting = FairQueue[RequestSequence](service.missing if service else lambda _: 1.0)
        self.loading: deque[RequestSequence] = deque()
        """Requests that stepped aside."""
        self.jobs, self.ahead, self.running = jobs, ahead, running
        self.preempted: deque[RequestSequence] = deque()
        """Requests that lost their blocks to another tenant's, with their answers so far."""

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not any((self.preempted, self.loading, self.waiting, self.jobs, self.ahead, self.running))

    @property
    def unadmitted(self) -> list[RequestSequence]:
        """Requests that have no blocks yet, next first."""
        return [*self.preempted, *self.loading, *self.waiting]

    @property
    def works_ahead(self) -> bool:
        """Whether to assemble prompts before their requests arrive: no request waits, and it costs running ones less
        than it saves.
        """
        return not self.someone_waits and not self.jobs and self._costs.ahead_pays(AHEAD_CHUNK, len(self.running))

    @property
    def someone_waits(self) -> bool:
        """Whether a request waits for its first token."""
        return bool(self.waiting or self.loading) or any(sequence.waits_for_first_token for sequence in self.running)

    def add(self, sequence: RequestSequence) -> None:
        """Queue a request. A check goes before all others of its tenant, as its tokens are within a budget, and calls
        are computed until it is judged.
        """
        self.waiting.push(sequence, sequence.tenant, len(sequence.tokens), is_first=sequence.is_check)
        if self._service:
            self._service.live.began(sequence.key, sequence.turn and sequence.turn.session, len(sequence.tokens))

    def schedule(self) -> list[Work]:
        """Admit requests that have room, and fill the next pass."""
        self._admit_waiting()
        self.passes += 1
        filling = _Pass(self._budget, LOGIT_ROWS, self._reach, self._costs, self._allowances())
        waits = self.someone_waits
        decoding = [one for one in self.running if not one.waits_for_first_token]
        prefills = [one for one in self.running if one.waits_for_first_token]
        short = [one for one in prefills if len(one.todo) <= FEW]
        for one in (*sorted(decoding, key=lambda one: one.last_pass), *short):  # left out longest first
            filling.add(one)
        self._add_jobs(filling, [job for job in self.jobs if job.is_awaited], self._budget)
        unawaited = [job for job in self.jobs if not job.is_awaited]
        if waits:
            self._add_jobs(filling, unawaited, int(LEARNING_SHARE * self._budget))
        for one in [one for one in prefills if len(one.todo) > FEW]:
            filling.add(one)
        if not waits and self.jobs:
            self._add_jobs(filling, unawaited, JOB_CHUNK)
        elif not waits and self.works_ahead:
            filling.allowed = None  # it comes out of nobody's share: it delays all by less than it saves
            for ahead in [one for one in self.ahead if one.translates or not self.running][:1]:
                filling.add(ahead, AHEAD_CHUNK)
        for item in filling.work:
            item.sequence.last_pass = self.passes
        return filling.work

    # admission ------------------------------------------------------------------------------------------------

    def _admit_waiting(self) -> None:
        room = self._admit_aside()
        while sequence := self._next(room and len(self.loading) < self._max_running):
            if not self._is_ready(sequence):
                self.waiting.take(sequence)
                self.loading.append(sequence)
            elif not self._start(sequence, self.waiting.take):
                if not room or self._is_first(sequence):
                    return
                room = False

    def _next(self, room: bool) -> RequestSequence | None:
        """Return the waiting request that goes next. If it lacks a place or room, it blocks all others in the same
        position, but not a tenant with nothing begun, nor short requests beside long prefills: those take up to half of
        a pass.
        """
        if self._service:
            self._service.arrange(self.waiting)
        heads = self.waiting.heads()
        first = next((one for one in heads if self._has_place(one) and (room or self._is_first(one))), None)
        short = sum(len(one.todo) for one in self.running if len(one.todo) <= FEW)
        if first or not room or len(self.running) >= self._max_running or short + FEW > self._budget // 2:
            return first
        if all(len(one.tokens) > FEW for one in self.waiting.unordered()):
            return None
        return next(one for one in self.waiting if len(one.tokens) <= FEW)

    def _admit_aside(self) -> bool:
        """Admit preempted requests, and ready ones that stepped aside. Returns False if one lacks room."""
        room = True
        for queue in (self.preempted, self.loading):
            for sequence in tuple(queue):
                if (queue is self.preempted or self._is_ready(sequence)) and self._has_place(sequence):
                    room &= self._start(sequence, queue.remove)
        return room

    def _start(self, sequence: RequestSequence, leave: Callable[[RequestSequence], None]) -> bool:
        """Admit a request, which is to `leave` its queue. Returns False if it lacks room; one that has ended with an
        error blocks no other.
        """
        if not self._admit(sequence):
            return sequence.is_over
        leave(sequence)
        self.running.append(sequence)
        return True

    def victim(self, sequence: RequestSequence) -> RequestSequence | None:
        """Return the running request that loses its blocks to a tenant's first one: a check, or the youngest of the
        tenant that runs the most, if it runs several. None if `sequence` may not preempt.
        """
        running = Counter(one.tenant for one in self.running)
        if not running or not self._is_first(sequence):
            return None
        if check := next((one for one in self.running if one.is_check and not one.finish), None):
            return check
        tenant, many = running.most_common(1)[0]
        own = [one for one in self.running if one.tenant == tenant and not one.finish]
        return own[-1] if many > 1 and own else None

    def preempt(self, sequence: RequestSequence) -> None:
        """Remove a request with freed blocks from the batch; it is admitted again before all others."""
        self.running.remove(sequence)
        self.preempted.append(sequence)

    def _is_first(self, sequence: RequestSequence) -> bool:
        """Return whether no other request of its tenant runs or has stepped aside. A check is none, and never first."""
        begun = (*self.running, *self.preempted, *self.loading)
        others = (one for one in begun if one is not sequence and not one.is_check)
        return not sequence.is_check and all(one.tenant != sequence.tenant for one in others)

    def _has_place(self, sequence: RequestSequence) -> bool:
        """Return whether another request may run and a pass has tokens left for it; a tenant's first request needs
        neither.
        """
        if self._is_first(sequence):
            return max(len(self.running), len(self.loading)) < 2 * self._max_running
        pending = sum(len(one.todo) for one in self.running)
        pending += sum(len(job.todo if job.admitted else job.tokens) for job in self.jobs if job.is_awaited)
        return len(self.running) < self._max_running and pending < self._budget

    def _allowances(self) -> Allowances | None:
        """Return the seconds that each tenant's work may add to the pass; None if only one tenant runs."""
        wanted: dict[TenantId, list[int]] = {}
        for sequence in self.running:
            wanted.setdefault(sequence.tenant, []).append(len(sequence.todo))
        if len(wanted) < 2:
            return None
        share = max(1, self._budget // len(wanted))
        least = min(self._costs.pass_seconds(min(sum(many), share), len(many)) for many in wanted.values())
        return dict.fromkeys([*wanted, *(job.tenant for job in self.jobs)], least)

    def _add_jobs(self, filling: _Pass, jobs: Iterable[BaseJob], most: int) -> None:
        """Add base prefills, oldest first, up to the first one without room."""
        for job in jobs:
            if min(most, filling.left) <= 0 or not (job.admitted or self._admit(job)):
                return
            most -= filling.add(job, most)

    def done(self, sequence: Sequence) -> None:
        """Remove a sequence from whatever queue it is in."""
        if isinstance(sequence, RequestSequence):
            if sequence in self.waiting:
                self.waiting.take(sequence, is_served=False)
            if self._service:
                self._service.live.ended(sequence.key, len(sequence.tokens))
        for queue in (self.running, self.loading, self.preempted, self.jobs, self.ahead):
            if sequence in queue:
                queue.remove(sequence)  # type: ignore[arg-type]
