"""What the dashboard remembers of one tenant: what waits and runs now, and a bounded past."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain, islice
from typing import Any, TypeVar

from kedge.server.dashboard.calls import CallRecord
from kedge.server.dashboard.failures import FailureLog
from kedge.server.dashboard.records import AgentName, AgentRecord, AgentState, by_source, finite, plain
from kedge.server.dashboard.runs import RunRecord
from kedge.server.dashboard.texts import CallTexts
from kedge.types import Completion, GenerateRequest, RequestId, Source, WorkflowId
from kedge.workflow.forecast import AgentKey, RunKey

K = TypeVar("K")
V = TypeVar("V")
MAX_AGENTS, MAX_RUNS, MAX_RECEIPTS = 128, 24, 40
"""Of a tenant; those that were heard of longest ago go first."""
BUCKET_SECONDS, BUCKETS = 5, 60
"""Tokens by source are summed over so many seconds, so many times."""


class TenantHistory:
    """One tenant's bounded past and present. Callers hold the lock of `History`."""

    def __init__(self) -> None:
        self.version = 0
        self.submissions = self.requests = self.run_count = 0
        self.tokens: Counter[Source] = Counter()
        self.live: dict[RequestId, CallRecord] = {}
        self.agents: OrderedDict[AgentName, AgentRecord] = OrderedDict()
        self.runs: OrderedDict[RunKey, RunRecord] = OrderedDict()
        self.receipts: deque[CallRecord] = deque(maxlen=MAX_RECEIPTS)
        self.series: deque[tuple[int, Counter[Source]]] = deque(maxlen=BUCKETS)
        self.failures = FailureLog()
        self.texts = CallTexts()

    # recording -------------------------------------------------------------------------------------------------

    def submitted(self, request: GenerateRequest, now: float) -> None:
        name = AgentName(request.workflow, request.agent)
        key = request.run_key if request.run else None
        self.submissions += 1
        call = self.live[request.request_id] = CallRecord(self.submissions, now, name, key, request)
        for one in self.live.values():
            one.see_load(len(self.live))
        self._remember_prompt(name, request)
        if key:
            run = self._run(key, now)
            run.workflow, run.has_ended = request.workflow, False
            run.put(request.agent, AgentState.WAITING)
            run.log.append(call)

    def _remember_prompt(self, name: AgentName, request: GenerateRequest) -> None:
        agent = self._agent(name)
        if request.fixed is not None and 0 < request.fixed <= request.prompt_tokens:
            tokens = chain.from_iterable(segment.tokens for segment in request.segments)
            agent.fixed = request.namespace, tuple(islice(tokens, request.fixed))

    def begun(self, request_id: RequestId) -> None:
        call = self.live.get(request_id)
        if call is None:  # it is being cancelled
            return
        call.state = AgentState.RUNNING
        if run := self._known(call.run):
            run.put(call.name.agent, AgentState.RUNNING)

    def ended(self, request_id: RequestId, completion: Completion | None, now: float, *, keeps_text: bool) -> None:
        call = self.live.pop(request_id)
        request, call.request = call.request, None
        call.at, call.state = now, AgentState.DONE if completion else AgentState.STOPPED
        if run := self._known(call.run):
            run.put(call.name.agent, call.state)
        if completion:
            self._remember(call, completion, now)
        if completion and request and keeps_text:
            self.texts.add(call.number, request, completion)

    def _remember(self, call: CallRecord, completion: Completion, now: float) -> None:
        receipt = completion.receipt
        self.requests += 1
        self.tokens.update(by_source(receipt))
        self._bucket(now).update(by_source(receipt))
        self._agent(call.name).answered(completion, call.ttft_load)
        call.completion = replace(completion, text="", tokens=(), logprobs=(), prompt_logprobs=())
        self.receipts.append(call)

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
        return _newest(self.agents, name, AgentRecord, MAX_AGENTS)

    def _run(self, key: RunKey, now: float) -> RunRecord:
        return _newest(self.runs, key, lambda: self._new_run(now), MAX_RUNS)

    def _new_run(self, now: float) -> RunRecord:
        self.run_count += 1
        return RunRecord(self.run_count, WorkflowId(""), now)

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
            "runs": [run.to_dict(key, now) for key, run in reversed(self.runs.items())],
            "series": self._told_series(now),
            "receipts": [call.to_dict(now) for call in reversed(self.receipts)],
            "failures": self.failures.to_dict(now),
        }

    def run_details(self, number: int, now: float) -> dict[str, Any] | None:
        found = ((key, run) for key, run in self.runs.items() if run.number == number)
        return next((run.to_details(key, now) for key, run in found), None)

    def call_details(self, number: int, now: float) -> dict[str, Any] | None:
        calls = chain(self.receipts, *(run.log for run in self.runs.values()))
        return next((call.to_details(now) for call in calls if call.number == number), None)

    def _told_agent(self, name: AgentName, agent: AgentRecord) -> dict[str, Any]:
        runs = (run for run in self.runs.values() if run.workflow == name.workflow)
        steps = min((run.steps[name.agent] for run in runs if name.agent in run.steps), default=None)
        live = _in_flight(one for one in self.live.values() if one.name == name)
        return {**name._asdict(), **live, "steps": finite(steps), **agent.to_dict()}

    def _told_series(self, now: float) -> dict[str, Any]:
        last, known = int(now // BUCKET_SECONDS), dict(self.series)
        slots = [known.get(slot, Counter()) for slot in range(last - BUCKETS + 1, last + 1)]
        return {"seconds": BUCKET_SECONDS, "tokens": {source: [slot[source] for slot in slots] for source in Source}}


def _newest(table: OrderedDict[K, V], key: K, make: Callable[[], V], most: int) -> V:
    """The entry of `key`, made where there is none, as the newest; of too many the oldest goes."""
    if key not in table:
        table[key] = make()
    table.move_to_end(key)
    if len(table) > most:
        table.popitem(last=False)
    return table[key]


def _in_flight(live: Iterable[CallRecord]) -> dict[str, int]:
    begun = [one.has_begun for one in live]
    return {"running": sum(begun), "waiting": len(begun) - sum(begun)}
