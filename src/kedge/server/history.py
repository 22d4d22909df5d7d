"""What a server remembers of each tenant: its last calls and failures, and the agents that it expects.

The dashboard's page and the gauges of `/metrics` make all else of these.

Texts of calls are kept only where a tenant's may be. The lock of `History` guards everything, so that the threads of
the engine's streams can tell and the event loop can read.
"""

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import chain, islice
from typing import Any

from kedge.engine.base import Tokenizer, spelled
from kedge.engine.common.watched import Watcher
from kedge.reuse.reasons import pieces
from kedge.server.http import CallFailure, receipt
from kedge.structures.bounded import ENTRIES, BoundedDict
from kedge.types import AgentKey, Completion, FinishReason, GenerateRequest, RequestId, TenantId, Tokens, WorkflowAgent
from kedge.workflow.forecast import Changes

REMEMBERED = 64
"""Of a tenant: agents whose fixed prompt is known, failures, and ended runs of the server. Of a call: misses"""
MAX_TEXT_TOKENS = 1 << 17
"""Of all prompts and answers that are kept of one tenant."""


class CallState(StrEnum):
    """Where a request is."""

    WAITING = "waiting"
    """It has no token yet."""
    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    """It ended without an answer."""


@dataclass(slots=True)
class CallRecord:
    """A request: where it is, and its receipt once it is answered."""

    number: int
    changed: int
    """The history's version as of its last change."""
    at: float
    """When it was submitted or, once it is over, when it ended."""
    load: int
    """Requests of the tenant in flight when it was submitted, this one included."""
    agent: WorkflowAgent
    """Workflow and agent are empty for a request that names none."""
    run: str
    request: GenerateRequest | None
    """While the engine has it, and as long as its text is kept."""
    state: CallState = CallState.WAITING
    answer: Mapping[str, Any] = field(default_factory=dict)
    """Its receipt as plain data, with its first misses: a prompt may have thousands of segments."""
    completion: Completion | None = None
    """As long as its text is kept."""

    def to_dict(self, now: float) -> dict[str, Any]:
        """Return plain data for the page, without the engine's ids: their numbers would give away other tenants'
        requests.
        """
        place = {"number": self.number, "age_s": round(now - self.at, 1), "state": self.state, "load": self.load}
        _, workflow, agent = self.agent
        return {**place, "workflow": workflow, "agent": agent, "run": self.run, **self.answer}


def text_of(request: GenerateRequest, completion: Completion, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a call's prompt, by segment and source, and its answer. Decodes the whole prompt, so call it off the event
    loop.
    """
    prompt = []
    for piece in pieces(request.segments, completion.receipt.spans):
        text = spelled(tokenizer, request.tokens[piece.start : piece.stop])
        prompt.append({"segment": request.segments[piece.segment].name, "source": piece.source, "text": text})
    return {"prompt": prompt, "answer": completion.text}


@dataclass(slots=True)
class TenantHistory:
    """One tenant's bounded past and present. Callers hold the lock of `History`."""

    version: int = 0
    submissions: int = 0
    live: dict[RequestId, CallRecord] = field(default_factory=dict)
    calls: deque[CallRecord] = field(default_factory=lambda: deque(maxlen=ENTRIES))
    """In the order of their submission."""
    fixed: BoundedDict[WorkflowAgent, Tokens] = field(default_factory=lambda: BoundedDict(REMEMBERED))
    """The beginning that an agent's prompts share, as of its last call."""
    steps: BoundedDict[AgentKey, float] = field(default_factory=BoundedDict)
    """Steps-to-execution of expected agents; infinite where unknown."""
    failures: deque[tuple[float, CallFailure]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """When each of them came, and what it was."""

    def trim_texts(self) -> None:
        """Forget the oldest texts beyond `MAX_TEXT_TOKENS`."""
        left = MAX_TEXT_TOKENS
        for call in reversed(self.calls):
            if call.request and call.completion:
                left -= call.request.prompt_tokens + len(call.completion.tokens)
                if left < 0:
                    call.request = call.completion = None


class History(Watcher):
    """What all tenants did. Any thread may tell and ask."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        keeps_texts: Callable[[TenantId], bool] = lambda _: False,
        count: Callable[[TenantId, Completion], None] = lambda *_: None,
    ) -> None:
        """`clock` in seconds; it never goes back. `keeps_texts` returns whether a tenant's texts may be kept. `count`
        takes every completion, also a cancelled one, one at a time.
        """
        self._clock, self._lock, self.keeps_texts, self._count = clock, threading.Lock(), keeps_texts, count
        self._tenants = defaultdict[TenantId, TenantHistory](TenantHistory)

    def submitted(self, request: GenerateRequest) -> None:
        with self._changing(request.tenant) as mine:
            mine.submissions += 1
            agent, run = request.workflow_agent, request.run_key.name if request.run else ""
            load = len(mine.live) + 1
            call = CallRecord(mine.submissions, mine.version, self._clock(), load, agent, run, request)
            mine.live[request.request_id] = call
            mine.calls.append(call)
            if request.fixed is not None and 0 < request.fixed <= request.prompt_tokens:
                tokens = chain.from_iterable(segment.tokens for segment in request.segments)
                mine.fixed[agent] = tuple(islice(tokens, request.fixed))

    def begun(self, tenant: TenantId, request_id: RequestId) -> None:
        with self._changing(tenant) as mine:
            call = mine.live[request_id]
            call.state, call.changed = CallState.RUNNING, mine.version

    def ended(self, tenant: TenantId, request_id: RequestId, completion: Completion | None = None) -> None:
        """Take note that a request is over; there is a receipt of it if it was answered."""
        with self._changing(tenant) as mine:
            if completion:
                self._count(tenant, completion)
            answer = completion if completion and completion.finish_reason is not FinishReason.CANCELLED else None
            call = mine.live.pop(request_id)
            call.at, call.changed = self._clock(), mine.version
            call.state = CallState.DONE if answer else CallState.STOPPED
            if answer:
                data = receipt(answer) | {"finish_reason": answer.finish_reason, "answer_tokens": len(answer.tokens)}
                call.answer = data | {"misses": data["misses"][:REMEMBERED]}
            if answer and self.keeps_texts(tenant):
                call.completion = answer
                mine.trim_texts()
            else:
                call.request = None

    def forecast(self, changes: Changes) -> None:
        for key, next_run in changes.items():
            with self._changing(key.namespace.tenant) as mine:
                mine.steps.pop(key, None)
                if next_run is not None:
                    mine.steps[key] = next_run.steps

    def failed(self, tenant: TenantId, failure: CallFailure) -> None:
        """Record a call or a run that ended in an error."""
        with self._changing(tenant) as mine:
            mine.failures.append((self._clock(), failure))

    def state(self, tenant: TenantId, since: int = 0) -> dict[str, Any]:
        """Return one tenant's past as plain data: the calls that have changed since version `since`,
        whom its runs expect, and its failures.
        """
        with self._lock:
            mine, now = self._tenants[tenant], self._clock()
            failures = [
                {**asdict(one), "type": one.type, "kind": one.kind, "age_s": round(now - at, 1)}
                for at, one in reversed(mine.failures)
            ]
            return {
                "version": mine.version,
                "calls": [call.to_dict(now) for call in mine.calls if call.changed > since],
                "steps": [{"run": key.run.name, "agent": key.agent, "steps": one} for key, one in mine.steps.items()],
                "failures": failures,
            }

    def texts(self, tenant: TenantId, number: int) -> tuple[GenerateRequest | None, Completion | None] | None:
        """Return what a call asked and was answered, as far as that is kept; None where the call is not remembered."""
        with self._lock:
            found = (call for call in self._tenants[tenant].calls if call.number == number)
            return next(((call.request, call.completion) for call in found), None)

    def in_flight(self) -> dict[TenantId, Counter[CallState]]:
        """Return how many requests of each tenant are in each state."""
        with self._lock:
            return {name: Counter(call.state for call in mine.live.values()) for name, mine in self._tenants.items()}

    def fixed_prompts(self, tenant: TenantId) -> dict[WorkflowAgent, Tokens]:
        """Return the beginning that each agent's prompts share, where that is known."""
        with self._lock:
            return dict(self._tenants[tenant].fixed)

    @contextmanager
    def _changing(self, tenant: TenantId) -> Iterator[TenantHistory]:
        with self._lock:
            mine = self._tenants[tenant]
            mine.version += 1
            yield mine
