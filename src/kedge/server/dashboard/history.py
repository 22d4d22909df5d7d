"""What the dashboard knows of each tenant: who waits and runs now, and a bounded past. Nothing in it grows for ever.

Its own lock guards it, so that the threads of the engine's streams can tell and the event loop can read.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, TypeVar

from kedge.engine.common.watched import Watcher
from kedge.server.dashboard.records import (
    AgentName,
    AgentRecord,
    AgentState,
    Ended,
    Live,
    RunRecord,
    by_source,
    finite,
    plain,
)
from kedge.types import Completion, GenerateRequest, Namespace, RequestId, Source, TenantId, Tokens, WorkflowId
from kedge.workflow.forecast import AgentKey, Changes, RunKey

K = TypeVar("K")
V = TypeVar("V")
MOST_AGENTS, MOST_RUNS, MOST_RECEIPTS = 128, 24, 40
"""Of a tenant; those that were heard of longest ago go first."""
BUCKET_SECONDS, BUCKETS = 5, 60
"""Tokens by source are summed over so many seconds, so many times."""


class _Tenant:
    """One tenant's history. Whoever calls holds the lock of `History`."""

    def __init__(self) -> None:
        self.version = 0
        self.requests = 0
        self.tokens: Counter[Source] = Counter()
        self.live: dict[RequestId, Live] = {}
        self.agents: OrderedDict[AgentName, AgentRecord] = OrderedDict()
        self.runs: OrderedDict[RunKey, RunRecord] = OrderedDict()
        self.receipts: deque[Ended] = deque(maxlen=MOST_RECEIPTS)
        self.series: deque[tuple[int, Counter[Source]]] = deque(maxlen=BUCKETS)

    # being told -----------------------------------------------------------------------------------------------

    def submitted(self, request: GenerateRequest, now: float) -> None:
        name = AgentName(request.workflow, request.agent)
        key = request.run_key if request.run else None
        self.live[request.request_id] = Live(name, key)
        agent = self._agent(name)
        if request.fixed is not None and 0 < request.fixed <= request.prompt_tokens:
            tokens = chain.from_iterable(segment.tokens for segment in request.segments)
            agent.fixed = request.namespace, tuple(islice(tokens, request.fixed))
        if key:
            run = self._run(key, now)
            run.workflow, run.has_ended = request.workflow, False
            run.put(request.agent, AgentState.WAITING)

    def begun(self, request_id: RequestId) -> None:
        one = self.live.get(request_id)
        if one is None:  # it is being cancelled
            return
        one.has_begun = True
        if run := self._known(one.run):
            run.put(one.name.agent, AgentState.RUNNING)

    def ended(self, request_id: RequestId, completion: Completion | None, now: float) -> None:
        one = self.live.pop(request_id)
        if run := self._known(one.run):
            run.put(one.name.agent, AgentState.DONE if completion else AgentState.STOPPED)
        if completion:
            self._remember(one, completion, now)

    def _remember(self, one: Live, completion: Completion, now: float) -> None:
        receipt = completion.receipt
        self.requests += 1
        self.tokens.update(by_source(receipt))
        self._bucket(now).update(by_source(receipt))
        self._agent(one.name).answered(completion)
        times = completion.ttft_ms, completion.total_ms
        self.receipts.append(Ended(self.requests, now, one.name, one.run, receipt, *times))

    def forecast(self, key: AgentKey, steps: float | None, now: float) -> None:
        """An agent's steps-to-execution; None: it is not expected any more."""
        run_key = key.run
        if steps is not None:
            self._run(run_key, now).expect(key.agent, steps)
        elif run := self._known(run_key):
            run.steps.pop(key.agent, None)

    def run_ended(self, key: RunKey) -> None:
        if run := self.runs.get(key):
            run.end()

    def _agent(self, name: AgentName) -> AgentRecord:
        return _newest(self.agents, name, AgentRecord, MOST_AGENTS)

    def _run(self, key: RunKey, now: float) -> RunRecord:
        return _newest(self.runs, key, lambda: RunRecord(WorkflowId(""), now), MOST_RUNS)

    def _known(self, key: RunKey | None) -> RunRecord | None:
        return self.runs.get(key) if key else None

    def _bucket(self, now: float) -> Counter[Source]:
        slot = int(now // BUCKET_SECONDS)
        if not self.series or self.series[-1][0] != slot:
            self.series.append((slot, Counter()))
        return self.series[-1][1]

    # being asked ----------------------------------------------------------------------------------------------

    def state(self, now: float) -> dict[str, Any]:
        return {
            "requests": self.requests,
            **_in_flight(self.live.values()),
            "tokens": plain(self.tokens),
            "agents": [self._told_agent(name, agent) for name, agent in sorted(self.agents.items())],
            "runs": [run.told(key, now) for key, run in reversed(self.runs.items())],
            "series": self._told_series(now),
            "receipts": [one.told(now) for one in reversed(self.receipts)],
        }

    def _told_agent(self, name: AgentName, agent: AgentRecord) -> dict[str, Any]:
        runs = (run for run in self.runs.values() if run.workflow == name.workflow)
        steps = min((run.steps[name.agent] for run in runs if name.agent in run.steps), default=None)
        live = _in_flight(one for one in self.live.values() if one.name == name)
        return {**name._asdict(), **live, "steps": finite(steps), **agent.told()}

    def _told_series(self, now: float) -> dict[str, Any]:
        last, known = int(now // BUCKET_SECONDS), dict(self.series)
        slots = [known.get(slot, Counter()) for slot in range(last - BUCKETS + 1, last + 1)]
        return {"seconds": BUCKET_SECONDS, "tokens": {source: [slot[source] for slot in slots] for source in Source}}


class History(Watcher):
    """What all tenants did. Any thread may tell and ask."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` in seconds; it never goes back."""
        self._clock, self._lock = clock, threading.Lock()
        self._tenants: dict[TenantId, _Tenant] = {}

    def submitted(self, request: GenerateRequest) -> None:
        """The engine has taken a request."""
        with self._changing(request.tenant) as mine:
            mine.submitted(request, self._clock())

    def begun(self, tenant: TenantId, request_id: RequestId) -> None:
        """A request's first token has come."""
        with self._changing(tenant) as mine:
            mine.begun(request_id)

    def ended(self, tenant: TenantId, request_id: RequestId, completion: Completion | None = None) -> None:
        """The engine has a request no longer; without a completion nothing of it is remembered. Idempotent."""
        with self._lock:
            if request_id in (mine := self._of(tenant)).live:
                mine.version += 1
                mine.ended(request_id, completion, self._clock())

    def cancelled(self, request_id: RequestId) -> None:
        """A request is being cancelled, whosever it is; its stream may have no reader who would tell."""
        with self._lock:
            tenant = next((name for name, mine in self._tenants.items() if request_id in mine.live), None)
        if tenant is not None:
            self.ended(tenant, request_id)

    def forecast(self, changes: Changes) -> None:
        """Agents whose next run is another than before."""
        for key, next_run in changes.items():
            with self._changing(key.namespace.tenant) as mine:
                mine.forecast(key, next_run.steps if next_run else None, self._clock())

    def run_ended(self, run: RunKey) -> None:
        """A run is over."""
        with self._changing(run.namespace.tenant) as mine:
            mine.run_ended(run)

    def version(self, tenant: TenantId) -> int:
        """Another number whenever something has changed."""
        with self._lock:
            return self._of(tenant).version

    def state(self, tenant: TenantId) -> dict[str, Any]:
        """Everything of one tenant as plain data, newest first where there is an order."""
        with self._lock:
            return self._of(tenant).state(self._clock())

    def fixed_prompts(self, tenant: TenantId) -> dict[AgentName, tuple[Namespace, Tokens]]:
        """Agent -> the namespace and the beginning that its prompts share, where that is known."""
        with self._lock:
            return {name: agent.fixed for name, agent in self._of(tenant).agents.items() if agent.fixed}

    @contextmanager
    def _changing(self, tenant: TenantId) -> Iterator[_Tenant]:
        with self._lock:
            mine = self._of(tenant)
            mine.version += 1
            yield mine

    def _of(self, tenant: TenantId) -> _Tenant:
        return self._tenants.setdefault(tenant, _Tenant())


def _newest(table: OrderedDict[K, V], key: K, make: Callable[[], V], most: int) -> V:
    """The entry of `key`, made where there is none, as the newest; of too many the oldest goes."""
    if key not in table:
        table[key] = make()
    table.move_to_end(key)
    if len(table) > most:
        table.popitem(last=False)
    return table[key]


def _in_flight(live: Iterable[Live]) -> dict[str, int]:
    begun = [one.has_begun for one in live]
    return {"running": sum(begun), "waiting": len(begun) - sum(begun)}
