"""What the dashboard remembers of each tenant: who waits and runs now, and a bounded past. Nothing grows for ever.

Texts of calls are kept only where a tenant's may be. The lock of `History` guards everything, so that the threads of
the engine's streams can tell and the event loop can read.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain, islice
from math import isfinite
from statistics import median
from typing import Any, NamedTuple, TypeVar

from kedge.engine.base import Tokenizer
from kedge.engine.common.watched import Watcher
from kedge.reuse.reasons import pieces
from kedge.server.http import OVERLOADED, CallFailure, FailureKind
from kedge.server.tenancy import KeyRing
from kedge.settings import ServerSettings
from kedge.types import (
    AgentId,
    Completion,
    GenerateRequest,
    Namespace,
    Receipt,
    RequestId,
    Segment,
    Source,
    Span,
    TenantId,
    Tokens,
    WorkflowId,
)
from kedge.workflow.forecast import Changes, RunKey

SAMPLES = 64
"""Times to first token by agent and kind; the median is of these."""


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


class Time(NamedTuple):
    """A time to first token, and the most requests in flight until then."""

    ttft_ms: float
    load: int


def kind_of(receipt: Receipt) -> PromptKind:
    """What a time to first token is to be compared as."""
    if 2 * (receipt.exact + receipt.translated) < receipt.prompt_tokens:
        return PromptKind.COMPUTED
    return PromptKind.TRANSLATED if receipt.translated > receipt.exact else PromptKind.EXACT


@dataclass(slots=True)
class AgentRecord:
    """What is remembered of an agent over all its runs."""

    calls: int = 0
    tokens: Counter[Source] = field(default_factory=Counter)
    times: dict[PromptKind, deque[Time]] = field(
        default_factory=lambda: {kind: deque(maxlen=SAMPLES) for kind in PromptKind},
    )
    fixed: tuple[Namespace, Tokens] | None = None
    """The namespace and the beginning that its prompts share, as of its last call."""

    def answered(self, completion: Completion, load: int) -> None:
        """Count a call; one that was answered without a token has no time to first token."""
        receipt = completion.receipt
        self.calls += 1
        self.tokens.update(by_source(receipt))
        if completion.tokens:
            self.times[kind_of(receipt)].append(Time(completion.ttft_ms, load))

    def to_dict(self) -> dict[str, Any]:
        return {
            "calls": self.calls,
            "tokens": plain(self.tokens),
            "ttft_ms": {kind: _medians(times) for kind, times in self.times.items()},
            "fixed": len(self.fixed[1]) if self.fixed else None,
        }


def by_source(receipt: Receipt) -> dict[Source, int]:
    """A prompt's tokens by source."""
    return {source: receipt.tokens(source) for source in Source}


def plain(tokens: Mapping[Source, int]) -> dict[str, int]:
    """Tokens by every source there is, by name."""
    return {source.value: tokens.get(source, 0) for source in Source}


def finite(steps: float | None) -> float | None:
    """Return steps for JSON, which has no infinity: None where they are unknown."""
    return steps if steps is not None and isfinite(steps) else None


def _medians(times: deque[Time]) -> dict[str, Any]:
    """The median of some times, and of the loads that they were measured at."""
    medians = [median(values) for values in zip(*times, strict=True)] or [None, None]
    return {"median": medians[0], "load": medians[1], "count": len(times)}


@dataclass(slots=True)
class CallRecord:
    """A request: where it is, its receipt once it is answered, and how many others ran beside it."""

    number: int
    at: float
    """When it was submitted or, once it is over, when it ended."""
    name: AgentName
    run: RunKey | None
    request: GenerateRequest | None
    """While the engine has it."""
    state: AgentState = AgentState.WAITING
    ttft_load: int = 1
    """Most requests of the tenant in flight at once, this one included, until the first token."""
    total_load: int = 1
    """The same until the end."""
    completion: Completion | None = None
    """Where it was answered; without its text and tokens."""

    def see_load(self, in_flight: int) -> None:
        """Take note of how many requests are in flight now."""
        self.total_load = max(self.total_load, in_flight)
        if self.state is not AgentState.RUNNING:
            self.ttft_load = self.total_load

    def to_dict(self, now: float) -> dict[str, Any]:
        """Plain data for the page, without the engine's ids: their numbers would give away other tenants' requests."""
        head = {
            "number": self.number,
            "age_s": round(now - self.at, 1),
            **self.name._asdict(),
            "run": self.run.name if self.run else "",
            "state": self.state,
        }
        if self.completion is None:
            return head
        receipt = self.completion.receipt
        return head | {
            "mode": receipt.mode,
            "kind": kind_of(receipt),
            "tokens": plain(by_source(receipt)),
            "ttft_ms": self.completion.ttft_ms,
            "ttft_load": self.ttft_load,
            "total_ms": self.completion.total_ms,
            "total_load": self.total_load,
            "finish_reason": self.completion.finish_reason,
            "misses": [{"segment": miss.segment, "reason": miss.reason} for miss in receipt.misses],
            "parts_ms": dict(receipt.parts_ms),
        }


MAX_AGENTS_OF_A_RUN = 64
MAX_CALLS_OF_A_RUN = 128


@dataclass(slots=True)
class RunRecord:
    """Where a run is; at most `MAX_AGENTS_OF_A_RUN` of its agents, and its last `MAX_CALLS_OF_A_RUN` calls."""

    number: int
    workflow: WorkflowId
    began: float
    has_ended: bool = False
    states: dict[AgentId, AgentState] = field(default_factory=dict)
    calls: Counter[AgentId] = field(default_factory=Counter)
    steps: dict[AgentId, float] = field(default_factory=dict)
    """Steps-to-execution; infinite where unknown."""
    log: deque[CallRecord] = field(default_factory=lambda: deque(maxlen=MAX_CALLS_OF_A_RUN))

    def put(self, agent: AgentId, state: AgentState) -> None:
        """An agent's state; a call is counted when it is done."""
        if self._has_room(agent):
            self.states[agent] = state
            self.calls[agent] += state is AgentState.DONE

    def expect(self, agent: AgentId, steps: float) -> None:
        """An agent's steps-to-execution; its state stays as it is."""
        if self._has_room(agent):
            self.states.setdefault(agent, AgentState.EXPECTED)
            self.steps[agent] = steps

    def _has_room(self, agent: AgentId) -> bool:
        return agent in self.states or len(self.states) < MAX_AGENTS_OF_A_RUN

    def to_dict(self, key: RunKey, now: float) -> dict[str, Any]:
        """Plain data for the page."""
        agents = {
            agent: {"state": state, "calls": self.calls[agent], "steps": finite(self.steps.get(agent))}
            for agent, state in self.states.items()
        }
        age = round(now - self.began, 1)
        head = {"number": self.number, "id": key.name, "workflow": self.workflow, "age_s": age}
        return {**head, "ended": self.has_ended, "agents": agents}


MAX_FAILURES = 40


@dataclass(slots=True)
class _Line:
    """Equal failures in a row; `newest` is the last of them."""

    newest: CallFailure
    at: float
    count: int = 1


@dataclass(slots=True)
class FailureLog:
    """Counts of all failures, and a line for each of the last `MAX_FAILURES` that differ."""

    counts: Counter[FailureKind] = field(default_factory=Counter)
    last_overload: float | None = None
    """When a call was refused for want of room, in seconds of the history's clock."""
    _lines: deque[_Line] = field(default_factory=lambda: deque(maxlen=MAX_FAILURES))

    def add(self, failure: CallFailure, now: float) -> None:
        """Record a failure."""
        self.counts[failure.kind] += 1
        if failure.code == OVERLOADED:
            self.last_overload = now
        if self._lines and self._lines[-1].newest.is_like(failure):
            line = self._lines[-1]
            line.newest, line.at, line.count = failure, now, line.count + 1
        else:
            self._lines.append(_Line(failure, now))

    def to_dict(self, now: float) -> dict[str, Any]:
        """Plain data for the page, newest first."""
        lines = [
            {**line.newest.to_dict(), "age_s": round(now - line.at, 1), "count": line.count}
            for line in reversed(self._lines)
        ]
        return {**{kind.value: self.counts[kind] for kind in FailureKind}, "list": lines}


MAX_TEXT_TOKENS = 1 << 17
"""Of all prompts and answers that are kept of one tenant."""


def text_policy(settings: ServerSettings, keys: KeyRing) -> Callable[[TenantId], bool]:
    """Return a function of the tenant: whether its texts may be kept, by its own setting or else the server's."""
    chosen = {tenant.id: tenant.keep_texts for tenant in keys.tenants if tenant.keep_texts is not None}
    return lambda tenant: chosen.get(tenant, settings.keep_texts)


@dataclass(frozen=True, slots=True)
class CallText:
    """The prompt of a call, by segment and source, and its answer."""

    segments: tuple[Segment, ...]
    spans: tuple[Span, ...]
    answer: str
    tokens: int
    """Of prompt and answer."""

    def to_dict(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Plain data for the page. Decodes the whole prompt, so call it off the event loop."""
        tokens = list(chain.from_iterable(segment.tokens for segment in self.segments))
        prompt = []
        for piece in pieces(self.segments, self.spans):
            # Special tokens are spelled out; a character cut in two becomes a replacement character.
            text = b"".join(map(tokenizer.token_bytes, tokens[piece.start : piece.stop])).decode("utf-8", "replace")
            prompt.append({"segment": self.segments[piece.segment].name, "source": piece.source, "text": text})
        return {"prompt": prompt, "answer": self.answer}


class CallTexts:
    """Texts by the numbers of their calls; the oldest give way to the newest."""

    def __init__(self, max_tokens: int = MAX_TEXT_TOKENS) -> None:
        self._max_tokens, self._tokens = max_tokens, 0
        self._texts: OrderedDict[int, CallText] = OrderedDict()

    def add(self, number: int, request: GenerateRequest, completion: Completion) -> None:
        """Keep a call's text; one that is longer than all that may be kept is dropped."""
        size = request.prompt_tokens + len(completion.tokens)
        self._texts[number] = CallText(request.segments, completion.receipt.spans, completion.text, size)
        self._tokens += size
        while self._tokens > self._max_tokens:
            _, oldest = self._texts.popitem(last=False)
            self._tokens -= oldest.tokens

    def get(self, number: int) -> CallText | None:
        """Return a call's text; None where it was not kept, or has given way."""
        return self._texts.get(number)


K = TypeVar("K")
V = TypeVar("V")
MAX_AGENTS, MAX_RUNS, MAX_RECEIPTS = 128, 24, 40
"""Of a tenant; those that were heard of longest ago go first."""
BUCKET_SECONDS, BUCKETS = 5, 60
"""Tokens by source are summed over so many seconds, so many times."""


@dataclass(slots=True)
class TenantHistory:
    """One tenant's bounded past and present, as plain data for the page. Callers hold the lock of `History`."""

    version: int = 0
    submissions: int = 0
    requests: int = 0
    run_count: int = 0
    tokens: Counter[Source] = field(default_factory=Counter)
    live: dict[RequestId, CallRecord] = field(default_factory=dict)
    agents: OrderedDict[AgentName, AgentRecord] = field(default_factory=OrderedDict)
    runs: OrderedDict[RunKey, RunRecord] = field(default_factory=OrderedDict)
    receipts: deque[CallRecord] = field(default_factory=lambda: deque(maxlen=MAX_RECEIPTS))
    series: deque[tuple[int, Counter[Source]]] = field(default_factory=lambda: deque(maxlen=BUCKETS))
    failures: FailureLog = field(default_factory=FailureLog)
    texts: CallTexts = field(default_factory=CallTexts)

    def agent(self, name: AgentName) -> AgentRecord:
        """Return an agent's record, as the newest."""
        return _newest(self.agents, name, AgentRecord, MAX_AGENTS)

    def run(self, key: RunKey, now: float) -> RunRecord:
        """Return a run's record, as the newest."""
        self.run_count += key not in self.runs
        return _newest(self.runs, key, lambda: RunRecord(self.run_count, WorkflowId(""), now), MAX_RUNS)

    def run_of(self, call: CallRecord) -> RunRecord | None:
        """Return the record of the run that a call is in, where that is remembered."""
        return self.runs.get(call.run) if call.run else None

    def state(self, now: float) -> dict[str, Any]:
        """Return everything, newest first where there is an order."""
        agents = []
        for name, agent in sorted(self.agents.items()):
            runs = (run for run in self.runs.values() if run.workflow == name.workflow)
            steps = min((run.steps[name.agent] for run in runs if name.agent in run.steps), default=None)
            live = _in_flight(one for one in self.live.values() if one.name == name)
            agents.append({**name._asdict(), **live, "steps": finite(steps), **agent.to_dict()})
        last, known = int(now // BUCKET_SECONDS), dict(self.series)
        slots = [known.get(slot, Counter()) for slot in range(last - BUCKETS + 1, last + 1)]
        series = {source: [slot[source] for slot in slots] for source in Source}
        return {
            "requests": self.requests,
            **_in_flight(self.live.values()),
            "tokens": plain(self.tokens),
            "agents": agents,
            "runs": [run.to_dict(key, now) for key, run in reversed(self.runs.items())],
            "series": {"seconds": BUCKET_SECONDS, "tokens": series},
            "receipts": [call.to_dict(now) for call in reversed(self.receipts)],
            "failures": self.failures.to_dict(now),
        }


def _newest(table: OrderedDict[K, V], key: K, make: Callable[[], V], most: int) -> V:
    """The entry of `key`, made where there is none, as the newest; of too many the oldest goes."""
    if key not in table:
        table[key] = make()
    table.move_to_end(key)
    if len(table) > most:
        table.popitem(last=False)
    return table[key]


def _in_flight(live: Iterable[CallRecord]) -> dict[str, int]:
    begun = [one.state is AgentState.RUNNING for one in live]
    return {"running": sum(begun), "waiting": len(begun) - sum(begun)}


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
            for one in mine.live.values():
                one.see_load(len(mine.live))
            agent = mine.agent(name)
            if request.fixed is not None and 0 < request.fixed <= request.prompt_tokens:
                tokens = chain.from_iterable(segment.tokens for segment in request.segments)
                agent.fixed = request.namespace, tuple(islice(tokens, request.fixed))
            if key:
                run = mine.run(key, now)
                run.workflow, run.has_ended = request.workflow, False
                run.put(request.agent, AgentState.WAITING)
                run.log.append(call)

    def begun(self, tenant: TenantId, request_id: RequestId) -> None:
        with self._changing(tenant) as mine:
            if call := mine.live.get(request_id):  # else it is being cancelled
                call.state = AgentState.RUNNING
                if run := mine.run_of(call):
                    run.put(call.name.agent, AgentState.RUNNING)

    def ended(self, tenant: TenantId, request_id: RequestId, completion: Completion | None = None) -> None:
        """Take note that a request is over; without a completion nothing of it is remembered. Idempotent."""
        with self._lock:
            mine = self._of(tenant)
            call = mine.live.pop(request_id, None)
            if call is None:
                return
            mine.version += 1
            now, request, call.request = self._clock(), call.request, None
            call.at, call.state = now, AgentState.DONE if completion else AgentState.STOPPED
            if run := mine.run_of(call):
                run.put(call.name.agent, call.state)
            if completion is None:
                return
            tokens, slot = by_source(completion.receipt), int(now // BUCKET_SECONDS)
            if not mine.series or mine.series[-1][0] != slot:
                mine.series.append((slot, Counter()))
            mine.requests += 1
            mine.tokens.update(tokens)
            mine.series[-1][1].update(tokens)
            mine.agent(call.name).answered(completion, call.ttft_load)
            call.completion = replace(completion, text="", tokens=(), logprobs=(), prompt_logprobs=())
            mine.receipts.append(call)
            if request and self.keeps_texts(tenant):
                mine.texts.add(call.number, request, completion)

    def cancelled(self, request_id: RequestId) -> None:
        with self._lock:
            tenant = next((name for name, mine in self._tenants.items() if request_id in mine.live), None)
        if tenant is not None:
            self.ended(tenant, request_id)

    def forecast(self, changes: Changes) -> None:
        for key, next_run in changes.items():
            with self._changing(key.namespace.tenant) as mine:
                if next_run is not None:
                    mine.run(key.run, self._clock()).expect(key.agent, next_run.steps)
                elif run := mine.runs.get(key.run):
                    run.steps.pop(key.agent, None)

    def run_ended(self, run: RunKey) -> None:
        with self._changing(run.namespace.tenant) as mine:
            if known := mine.runs.get(run):
                known.has_ended = True
                known.steps.clear()

    def failed(self, tenant: TenantId, failure: CallFailure) -> None:
        """Record a call or a run of a tenant that ended in an error."""
        with self._changing(tenant) as mine:
            mine.failures.add(failure, self._clock())

    def version(self, tenant: TenantId) -> int:
        """Another number whenever something has changed."""
        with self._lock:
            return self._of(tenant).version

    def state(self, tenant: TenantId) -> dict[str, Any]:
        """Return everything of one tenant as plain data, newest first where there is an order."""
        with self._lock:
            return self._of(tenant).state(self._clock())

    def run(self, tenant: TenantId, number: int) -> dict[str, Any] | None:
        """Return a run of a tenant with its calls; None where it is not remembered."""
        with self._lock:
            found = (one for one in self._of(tenant).runs.items() if one[1].number == number)
            now = self._clock()
            shown = ({**run.to_dict(key, now), "calls": [one.to_dict(now) for one in run.log]} for key, run in found)
            return next(shown, None)

    def call(self, tenant: TenantId, number: int) -> tuple[dict[str, Any], CallText | None] | None:
        """Return a call of a tenant and its text, as far as that is kept; None where it is not remembered."""
        with self._lock:
            mine = self._of(tenant)
            calls = chain(mine.receipts, *(run.log for run in mine.runs.values()))
            found = (call.to_dict(self._clock()) for call in calls if call.number == number)
            return next(((details, mine.texts.get(number)) for details in found), None)

    def seconds_since_overload(self, tenant: TenantId) -> float | None:
        """Return how many seconds ago a call of the tenant was last refused for want of room; None: never."""
        with self._lock:
            at = self._of(tenant).failures.last_overload
            return None if at is None else self._clock() - at

    def fixed_prompts(self, tenant: TenantId) -> dict[AgentName, tuple[Namespace, Tokens]]:
        """Agent -> the namespace and the beginning that its prompts share, where that is known."""
        with self._lock:
            return {name: agent.fixed for name, agent in self._of(tenant).agents.items() if agent.fixed}

    @contextmanager
    def _changing(self, tenant: TenantId) -> Iterator[TenantHistory]:
        with self._lock:
            mine = self._of(tenant)
            mine.version += 1
            yield mine

    def _of(self, tenant: TenantId) -> TenantHistory:
        return self._tenants.setdefault(tenant, TenantHistory())
