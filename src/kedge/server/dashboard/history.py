"""What the dashboard remembers of each tenant: its last calls, its runs and its failures. All else follows from these.

Texts of calls are kept only where a tenant's may be. The lock of `History` guards everything, so that the threads of
the engine's streams can tell and the event loop can read.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import chain, islice
from math import isfinite
from statistics import median
from typing import Any, NamedTuple

from kedge.engine.base import Tokenizer
from kedge.engine.common.watched import Watcher
from kedge.reuse.reasons import pieces
from kedge.server.http import OVERLOADED, CallFailure, FailureKind, receipt
from kedge.server.tenancy import KeyRing
from kedge.settings import ServerSettings
from kedge.structures.bounded import BoundedDict
from kedge.types import (
    AgentId,
    Completion,
    GenerateRequest,
    Namespace,
    Receipt,
    RequestId,
    Source,
    TenantId,
    Tokens,
    WorkflowId,
)
from kedge.workflow.forecast import Changes, RunKey

MAX_CALLS, MAX_RUNS, MAX_LISTED = 1024, 24, 40
"""Calls and runs of a tenant that are remembered; receipts and failures that the page lists."""
MAX_AGENTS = 64
"""Agents of a run that are expected, and agents of a tenant whose fixed prompt is known."""
MAX_TEXT_TOKENS = 1 << 17
"""Of all prompts and answers that are kept of one tenant."""
BUCKET_SECONDS, BUCKETS = 5, 60
"""Tokens by source are summed over so many seconds, so many times."""


class PromptKind(StrEnum):
    """What most of a prompt's tokens were, for comparing times to first token."""

    COMPUTED = "computed"
    """Less than half of them were reused."""
    EXACT = "exact"
    TRANSLATED = "translated"
    """Half of them or more were reused, by translation in the main."""


class AgentState(StrEnum):
    """Where an agent is in a run."""

    EXPECTED = "expected"
    WAITING = "waiting"
    """Its request has no token yet."""
    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    """Its request ended without an answer."""


class AgentName(NamedTuple):
    """An agent of a workflow, whatever the run; both are empty for a request that names none."""

    workflow: WorkflowId
    agent: AgentId


def kind_of(receipt: Receipt) -> PromptKind:
    """Return what a time to first token is to be compared as."""
    if 2 * (receipt.exact + receipt.translated) < receipt.prompt_tokens:
        return PromptKind.COMPUTED
    return PromptKind.TRANSLATED if receipt.translated > receipt.exact else PromptKind.EXACT


def finite(steps: float | None) -> float | None:
    """Return steps for JSON, which has no infinity: None where they are unknown."""
    return steps if steps is not None and isfinite(steps) else None


def text_policy(settings: ServerSettings, keys: KeyRing) -> Callable[[TenantId], bool]:
    """Return a function of the tenant: whether its texts may be kept, by its own setting or else the server's."""
    chosen = {tenant.id: tenant.keep_texts for tenant in keys.tenants if tenant.keep_texts is not None}
    return lambda tenant: chosen.get(tenant, settings.keep_texts)


@dataclass(slots=True)
class CallRecord:
    """A request: where it is, its receipt once it is answered, and how many others ran beside it."""

    number: int
    at: float
    """When it was submitted or, once it is over, when it ended."""
    name: AgentName
    run: RunKey | None
    request: GenerateRequest | None
    """While the engine has it, and as long as its text is kept."""
    state: AgentState = AgentState.WAITING
    ttft_load: int = 1
    """Most requests of the tenant in flight at once, this one included, until the first token."""
    total_load: int = 1
    """The same until the end."""
    completion: Completion | None = None
    """Where it was answered; without its text and tokens, unless its text is kept."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Of the prompt of an answered request, by source"""
    has_token: bool = False
    """Whether the answer has a token, so that there is a time to the first"""

    def see_load(self, in_flight: int) -> None:
        """Take note of how many requests are in flight now."""
        self.total_load = max(self.total_load, in_flight)
        if self.state is not AgentState.RUNNING:
            self.ttft_load = self.total_load

    def drop_text(self) -> None:
        """Forget what was asked and answered."""
        self.request = None
        if self.completion:
            self.completion = replace(self.completion, text="", tokens=(), logprobs=(), prompt_logprobs=())

    def to_dict(self, now: float) -> dict[str, Any]:
        """Return plain data for the page, without the engine's ids: their numbers would give away other tenants'
        requests.
        """
        head = {
            "number": self.number,
            "age_s": round(now - self.at, 1),
            **self.name._asdict(),
            "run": self.run.name if self.run else "",
            "state": self.state,
        }
        if self.completion is None:
            return head
        return head | {
            **receipt(self.completion),
            "kind": kind_of(self.completion.receipt),
            "ttft_load": self.ttft_load,
            "total_load": self.total_load,
            "finish_reason": self.completion.finish_reason,
        }


def text_of(request: GenerateRequest, completion: Completion, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a call's prompt, by segment and source, and its answer. Decodes the whole prompt, so call it off the event
    loop.
    """
    prompt = []
    for piece in pieces(request.segments, completion.receipt.spans):
        # Special tokens are spelled out; a character cut in two becomes a replacement character.
        text = b"".join(map(tokenizer.token_bytes, request.tokens[piece.start : piece.stop])).decode("utf-8", "replace")
        prompt.append({"segment": request.segments[piece.segment].name, "source": piece.source, "text": text})
    return {"prompt": prompt, "answer": completion.text}


@dataclass(slots=True)
class RunRecord:
    """A run; its agents' states are those of its calls."""

    number: int
    began: float
    workflow: WorkflowId = WorkflowId("")
    has_ended: bool = False
    steps: dict[AgentId, float] = field(default_factory=dict)
    """Steps-to-execution of at most `MAX_AGENTS` expected agents; infinite where unknown."""

    def to_dict(self, key: RunKey, calls: Iterable[CallRecord], now: float) -> dict[str, Any]:
        """Return plain data for the page."""
        states, done = dict.fromkeys(self.steps, AgentState.EXPECTED), Counter[AgentId]()
        for call in calls:
            states[call.name.agent] = call.state
            done[call.name.agent] += call.state is AgentState.DONE
        agents = {
            agent: {"state": state, "calls": done[agent], "steps": finite(self.steps.get(agent))}
            for agent, state in states.items()
        }
        age = round(now - self.began, 1)
        head = {"number": self.number, "id": key.name, "workflow": self.workflow, "age_s": age}
        return {**head, "ended": self.has_ended, "agents": agents}


@dataclass(slots=True)
class FailureLine:
    """Equal failures in a row; `newest` is the last of them."""

    newest: CallFailure
    at: float
    count: int = 1


@dataclass(slots=True)
class TenantHistory:
    """One tenant's bounded past and present. Callers hold the lock of `History`."""

    version: int = 0
    submissions: int = 0
    requests: int = 0
    run_count: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    live: dict[RequestId, CallRecord] = field(default_factory=dict)
    calls: deque[CallRecord] = field(default_factory=lambda: deque(maxlen=MAX_CALLS))
    """In the order of their submission"""
    answered: deque[CallRecord] = field(default_factory=lambda: deque(maxlen=MAX_LISTED))
    texts: deque[CallRecord] = field(default_factory=deque)
    """The calls whose text is kept"""
    text_tokens: int = 0
    runs: BoundedDict[RunKey, RunRecord] = field(default_factory=lambda: BoundedDict(MAX_RUNS))
    fixed: BoundedDict[AgentName, tuple[Namespace, Tokens]] = field(default_factory=lambda: BoundedDict(MAX_AGENTS))
    """The namespace and the beginning that an agent's prompts share, as of its last call"""
    series: deque[tuple[int, Counter[str]]] = field(default_factory=lambda: deque(maxlen=BUCKETS))
    failures: deque[FailureLine] = field(default_factory=lambda: deque(maxlen=MAX_LISTED))
    failed: Counter[FailureKind] = field(default_factory=Counter)

    def run(self, key: RunKey, now: float) -> RunRecord:
        """Return a run's record, as the newest."""
        self.run_count += key not in self.runs
        return self.runs.use(key, lambda: RunRecord(self.run_count, now))

    def keep_text(self, call: CallRecord) -> None:
        """Keep a call's text; the oldest ones give way."""
        self.texts.append(call)
        self.text_tokens += _size(call)
        while self.text_tokens > MAX_TEXT_TOKENS:
            oldest = self.texts.popleft()
            self.text_tokens -= _size(oldest)
            oldest.drop_text()

    def add_failure(self, failure: CallFailure, now: float) -> None:
        """Record a failure; those in a row that differ in their reasons' figures at most have one line."""
        self.failed[failure.kind] += 1
        last = self.failures[-1] if self.failures else None
        if last and replace(last.newest, reason=failure.reason) == failure:
            last.newest, last.at, last.count = failure, now, last.count + 1
        else:
            self.failures.append(FailureLine(failure, now))

    def state(self, now: float) -> dict[str, Any]:
        """Return everything as plain data, newest first where there is an order."""
        by_agent: dict[AgentName, list[CallRecord]] = {}
        by_run: dict[RunKey | None, list[CallRecord]] = {}
        for call in self.calls:
            by_agent.setdefault(call.name, []).append(call)
            by_run.setdefault(call.run, []).append(call)
        last, known = int(now // BUCKET_SECONDS), dict(self.series)
        slots = [known.get(slot, Counter()) for slot in range(last - BUCKETS + 1, last + 1)]
        series = {source.value: [slot[source] for slot in slots] for source in Source}
        failures = [
            {**asdict(one.newest), "kind": one.newest.kind, "age_s": round(now - one.at, 1), "count": one.count}
            for one in self.failures
        ]
        return {
            "requests": self.requests,
            **_in_flight(self.live.values()),
            "tokens": _by_source(self.tokens),
            "agents": [self._agent(name, calls) for name, calls in sorted(by_agent.items())],
            "runs": [run.to_dict(key, by_run.get(key, ()), now) for key, run in reversed(self.runs.items())],
            "series": {"seconds": BUCKET_SECONDS, "tokens": series},
            "receipts": [call.to_dict(now) for call in reversed(self.answered)],
            "failures": {**{kind.value: self.failed[kind] for kind in FailureKind}, "list": failures[::-1]},
        }

    def _agent(self, name: AgentName, calls: list[CallRecord]) -> dict[str, Any]:
        """Return what its remembered calls say of an agent."""
        answered = [(one, one.completion) for one in calls if one.completion]
        runs = (run for run in self.runs.values() if run.workflow == name.workflow)
        times: dict[PromptKind, list[tuple[float, int]]] = {kind: [] for kind in PromptKind}
        for call, done in answered:
            if call.has_token:
                times[kind_of(done.receipt)].append((done.ttft_ms, call.ttft_load))
        steps = min((run.steps[name.agent] for run in runs if name.agent in run.steps), default=None)
        return {
            **name._asdict(),
            **_in_flight(calls),
            "steps": finite(steps),
            "calls": len(answered),
            "tokens": _by_source(sum((call.tokens for call, _ in answered), Counter())),
            "ttft_ms": {kind: _medians(some) for kind, some in times.items()},
            "fixed": len(self.fixed[name][1]) if name in self.fixed else None,
        }


def _size(call: CallRecord) -> int:
    assert call.request and call.completion
    return call.request.prompt_tokens + len(call.completion.tokens)


def _by_source(tokens: Counter[str]) -> dict[str, int]:
    return {source.value: tokens[source] for source in Source}


def _medians(times: list[tuple[float, int]]) -> dict[str, Any]:
    """Return the median of some times, and of the loads that they were measured at."""
    medians = [median(values) for values in zip(*times, strict=True)] or [None, None]
    return {"median": medians[0], "load": medians[1], "count": len(times)}


def _in_flight(calls: Iterable[CallRecord]) -> dict[str, int]:
    states = Counter(one.state for one in calls)
    return {"running": states[AgentState.RUNNING], "waiting": states[AgentState.WAITING]}


class History(Watcher):
    """What all tenants did. Any thread may tell and ask."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, keeps_texts: Callable[[TenantId], bool] = lambda _: False
    ) -> None:
        """`clock` in seconds; it never goes back. `keeps_texts` returns whether a tenant's texts may be kept."""
        self._clock, self._lock, self.keeps_texts = clock, threading.Lock(), keeps_texts
        self._tenants: dict[TenantId, TenantHistory] = {}

    def submitted(self, request: GenerateRequest) -> None:
        with self._changing(request.tenant) as mine:
            now, name = self._clock(), AgentName(request.workflow, request.agent)
            key = request.run_key if request.run else None
            mine.submissions += 1
            call = mine.live[request.request_id] = CallRecord(mine.submissions, now, name, key, request)
            mine.calls.append(call)
            for one in mine.live.values():
                one.see_load(len(mine.live))
            if request.fixed is not None and 0 < request.fixed <= request.prompt_tokens:
                tokens = chain.from_iterable(segment.tokens for segment in request.segments)
                mine.fixed[name] = request.namespace, tuple(islice(tokens, request.fixed))
            if key:
                run = mine.run(key, now)
                run.workflow, run.has_ended = request.workflow, False

    def begun(self, tenant: TenantId, request_id: RequestId) -> None:
        with self._changing(tenant) as mine:
            if call := mine.live.get(request_id):  # else it is being cancelled
                call.state = AgentState.RUNNING

    def ended(self, tenant: TenantId, request_id: RequestId, completion: Completion | None = None) -> None:
        """Take note that a request is over; without a completion nothing of it is remembered. Idempotent."""
        with self._lock:
            mine = self._of(tenant)
            call = mine.live.pop(request_id, None)
            if call is None:
                return
            mine.version += 1
            now = self._clock()
            call.at, call.state, call.completion = now, AgentState.STOPPED, completion
            if completion is None:
                call.drop_text()
                return
            call.state, call.has_token = AgentState.DONE, bool(completion.tokens)
            call.tokens = Counter({source.value: completion.receipt.tokens(source) for source in Source})
            if not mine.series or mine.series[-1][0] != int(now // BUCKET_SECONDS):
                mine.series.append((int(now // BUCKET_SECONDS), Counter()))
            mine.requests += 1
            mine.tokens.update(call.tokens)
            mine.series[-1][1].update(call.tokens)
            mine.answered.append(call)
            if self.keeps_texts(tenant):
                mine.keep_text(call)
            else:
                call.drop_text()

    def cancelled(self, request_id: RequestId) -> None:
        with self._lock:
            tenant = next((name for name, mine in self._tenants.items() if request_id in mine.live), None)
        if tenant is not None:
            self.ended(tenant, request_id)

    def forecast(self, changes: Changes) -> None:
        for key, next_run in changes.items():
            with self._changing(key.namespace.tenant) as mine:
                if next_run is None:
                    if run := mine.runs.get(key.run):
                        run.steps.pop(key.agent, None)
                    continue
                steps = mine.run(key.run, self._clock()).steps
                if key.agent in steps or len(steps) < MAX_AGENTS:
                    steps[key.agent] = next_run.steps

    def run_ended(self, run: RunKey) -> None:
        with self._changing(run.namespace.tenant) as mine:
            if known := mine.runs.get(run):
                known.has_ended = True
                known.steps.clear()

    def failed(self, tenant: TenantId, failure: CallFailure) -> None:
        """Record a call or a run of a tenant that ended in an error."""
        with self._changing(tenant) as mine:
            mine.add_failure(failure, self._clock())

    def version(self, tenant: TenantId) -> int:
        """Return another number whenever something has changed."""
        with self._lock:
            return self._of(tenant).version

    def state(self, tenant: TenantId) -> dict[str, Any]:
        """Return everything of one tenant as plain data, newest first where there is an order."""
        with self._lock:
            return self._of(tenant).state(self._clock())

    def run(self, tenant: TenantId, number: int) -> dict[str, Any] | None:
        """Return a run of a tenant with its calls; None where it is not remembered."""
        with self._lock:
            mine, now = self._of(tenant), self._clock()
            for key, run in mine.runs.items():
                if run.number == number:
                    calls = [call for call in mine.calls if call.run == key]
                    return {**run.to_dict(key, calls, now), "calls": [one.to_dict(now) for one in calls]}
        return None

    def call(
        self, tenant: TenantId, number: int
    ) -> tuple[dict[str, Any], GenerateRequest | None, Completion | None] | None:
        """Return a call of a tenant, its request as far as its text is kept, and its completion; None where it is not
        remembered.
        """
        with self._lock:
            for call in self._of(tenant).calls:
                if call.number == number:
                    return call.to_dict(self._clock()), call.request, call.completion
        return None

    def seconds_since_overload(self, tenant: TenantId) -> float | None:
        """Return how many seconds ago a call of the tenant was last refused for want of room; None: never."""
        with self._lock:
            refused = [one.at for one in self._of(tenant).failures if one.newest.code == OVERLOADED]
            return self._clock() - max(refused) if refused else None

    def fixed_prompts(self, tenant: TenantId) -> dict[AgentName, tuple[Namespace, Tokens]]:
        """Return the namespace and the beginning that each agent's prompts share, where that is known."""
        with self._lock:
            return dict(self._of(tenant).fixed)

    @contextmanager
    def _changing(self, tenant: TenantId) -> Iterator[TenantHistory]:
        with self._lock:
            mine = self._of(tenant)
            mine.version += 1
            yield mine

    def _of(self, tenant: TenantId) -> TenantHistory:
        return self._tenants.setdefault(tenant, TenantHistory())
