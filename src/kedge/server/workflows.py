"""Workflows over HTTP: registered ones, runs of them that the server drives, and hints without a prompt."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Header, Response
from pydantic import Strict

from kedge.errors import KedgeError, LimitReached, PromptTooLong, RequestError, SpecError, WorkflowError
from kedge.guard import GuardMode
from kedge.hints.without_prompt import outcomes
from kedge.runner.prompts import compiled
from kedge.runner.run import AgentResult, EventKind, RunEvent, RunResult, check_inputs, run
from kedge.server.client_runs import Registered
from kedge.server.history import REMEMBERED
from kedge.server.http import (
    ERRORS,
    JSON,
    STREAMED,
    YAML,
    Answers,
    Body,
    CallFailure,
    EventStream,
    JSONAnswer,
    TypedRoute,
    accepted,
    event,
    receipt,
)
from kedge.server.service import Service, TheCaller
from kedge.server.tenancy import Tenant, found
from kedge.settings.sections import shown_fidelity
from kedge.types import AgentId, RequestId, ReuseMode
from kedge.workflow.graph import Workflow
from kedge.workflow.spec import build_workflow, parse

logger = logging.getLogger(__name__)
ReuseChoice = Annotated[ReuseMode, Strict(False)]  # it comes as a text
RunReuse = Annotated[
    ReuseChoice | dict[str, ReuseChoice],
    accepted("'off', 'exact' or 'translate', or an object with one of these for each agent that it names"),
]


class RunBody(Body):
    """Request to start a run of a registered workflow."""

    inputs: dict[str, str]
    reuse: RunReuse | None = None
    """One mode for all agents without a mode of their own, or modes by agent, which override everything else."""
    guard: Annotated[GuardMode, Strict(False)] | None = None
    """Mode of the quality guard for all agents without one of their own."""
    stream: bool = False


router = APIRouter(tags=["Kedge"], responses=ERRORS, route_class=TypedRoute)
MAX_WORKFLOWS, MAX_STEPS = 256, 1024
"""Workflows of a tenant, calls in one run of a workflow."""
MAX_FILE_BYTES = 256 << 10
"""Limit of a workflow file, since YAML is slow to read."""
CREATED: Answers = {201: {"description": "Created", "content": {JSON: {"schema": {}}}}}
FILE = {"requestBody": {"required": True, "content": {kind: {"schema": {"type": "object"}} for kind in (JSON, *YAML)}}}


# workflows ------------------------------------------------------------------------------------------------------------


@router.post("/v1/workflows", openapi_extra=FILE, responses=CREATED)
async def register(caller: TheCaller, reuse: ReuseMode | None = None) -> Response:
    """Register the workflow file in the body (YAML, or JSON by its content type), or replace the one with its name.

    `reuse` is the mode of agents without a mode of their own.
    """
    service, request = caller.service, caller.request
    content, kind = await request.body(), request.headers.get("content-type", "")

    def build() -> Registered:
        if len(content) > MAX_FILE_BYTES:
            raise SpecError("body", f"{len(content)} bytes", f"a workflow file has at most {MAX_FILE_BYTES}")
        data = parse(content, ".json" if "json" in kind else ".yaml", "body", f"{len(content)} bytes")
        flow = _checked(data, tools=service.settings.tools)
        prompts = compiled(flow, service.engine.tokenizer)  # type: ignore[arg-type] # objects have a hash
        return Registered(flow, reuse, prompts)

    new = await service.threads.work(build)
    known, given = caller.tenant.workflows, new.workflow.name
    is_new = given not in known
    if is_new and len(known) >= MAX_WORKFLOWS:
        raise RequestError("name", given, f"at most {MAX_WORKFLOWS} workflows are kept: delete one")
    known[given] = new
    return JSONAnswer(_described(new), 201 if is_new else 200)


def _checked(data: object, *, tools: bool) -> Workflow:
    """Return the workflow of parsed YAML or JSON. Raises `WorkflowError`."""
    given = data.get("agents") if isinstance(data, dict) else None
    agents = given if isinstance(given, list) else []
    if len(agents) > MAX_STEPS:
        raise WorkflowError("agents", len(agents), f"at most {MAX_STEPS} may be in a workflow")
    for agent in agents:
        if isinstance(agent, dict) and agent.get("tool") is not None and not tools:
            raise SpecError("tool", agent["tool"], "this server runs no tools (`kedge serve --tools` allows them)")
    flow = build_workflow(data)
    if not flow.name.strip() or len(flow.name) > 128 or "/" in flow.name or not flow.name.isprintable():
        raise SpecError("name", flow.name, "must have 1 to 128 printable characters without '/'")
    if len(flow.agents) * flow.turns > MAX_STEPS:
        raise WorkflowError("agents", len(flow.agents), f"with their turns, at most {MAX_STEPS} calls in a run")
    return flow


@router.get("/v1/workflows")
async def workflows(caller: TheCaller) -> Response:
    """List the tenant's workflows."""
    known = sorted(caller.tenant.workflows.items())
    described = await caller.service.threads.work(lambda: [_described(one) for _, one in known])
    return JSONAnswer({"object": "list", "data": described})


@router.get("/v1/workflows/{name}")
async def workflow(name: str, caller: TheCaller) -> Response:
    """Return a workflow with its agents."""
    return JSONAnswer(_described(found("workflow", caller.tenant.workflows, name)))


@router.delete("/v1/workflows/{name}")
async def delete(name: str, caller: TheCaller) -> Response:
    """Remove a workflow; its runs go on."""
    found("workflow", caller.tenant.workflows, name)
    del caller.tenant.workflows[name]
    return JSONAnswer({"id": name, "object": "workflow", "deleted": True})


def _described(one: Registered) -> dict[str, Any]:
    flow = one.workflow
    places = {agent: at for at, agent in enumerate(flow.order)}
    agents = [
        {
            "id": agent.id,
            "title": agent.title,
            "waits_for": sorted(flow.waits_for[AgentId(agent.id)], key=places.__getitem__),
            "reads": [placeholder.name for placeholder in agent.placeholders],
            "tool": agent.tool is not None,
            "reuse": agent.reuse,
            "guard": agent.guard,
            "fidelity": shown_fidelity(agent.fidelity),
            "pick": agent.pick,
        }
        for agent in sorted(flow.agents, key=lambda agent: places[AgentId(agent.id)])
    ]
    head = {"id": flow.name, "object": "workflow", "inputs": flow.inputs, "turns": flow.turns, "reuse": one.reuse}
    return {**head, "agents": agents}


# runs -----------------------------------------------------------------------------------------------------------------


KEEP_ALIVE, KEEP_ALIVE_SECONDS = b": still there\n\n", 15.0
"""A comment, and the time without an event after which a stream sends it."""


class RunStatus(StrEnum):
    """State of a run."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(eq=False)
class ServerRun:
    """Run that the server drives, in a thread of its own, which posts all events to the event loop. Belongs to the
    event loop, except `is_cancelled`, which its thread reads.
    """

    service: Service
    tenant: Tenant
    flow: Workflow
    inputs: Mapping[str, str]
    id: str = field(default_factory=lambda: f"run-{uuid.uuid4().hex}")
    status: RunStatus = RunStatus.RUNNING
    events: list[bytes] = field(default_factory=list)
    """Server-sent events as they are streamed: kept as data, they would take twice the memory"""
    outcome: Mapping[str, Any] = field(default_factory=dict)
    """Its result or error, once it has ended"""
    in_flight: set[RequestId] = field(default_factory=set)
    is_cancelled: bool = False
    failure: CallFailure | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def __post_init__(self) -> None:
        """Start the run."""
        tracing = self.service.tracing
        self._span = tracing.run(self.tenant.id, self.id, self.flow) if tracing else None
        self.service.metrics.runs.labels(self.tenant.id).inc()
        self.service.calls[self] = lambda _: self.cancel()
        start = partial(run, self.service.engine, self.flow, self.inputs, reuse=ReuseMode.EXACT, run_id=self.id)
        result = self.service.threads.wait(partial(start, tenant=self.tenant.id, on_event=self._post))
        result.add_done_callback(lambda ended: self._loop.call_soon_threadsafe(self._end, ended))

    async def follow(self, start: int = 0) -> AsyncIterator[bytes]:
        """Yield which run it is, the events from number `start` on until it ends, and a comment after a while without
        one.
        """
        yield event({"id": self.id, "workflow": self.flow.name}, name="run")
        at = max(0, start)
        while True:
            news = self._news
            while at < len(self.events):
                yield self.events[at]
                at += 1
            if self.status is not RunStatus.RUNNING:
                return
            try:
                await asyncio.wait_for(news.wait(), KEEP_ALIVE_SECONDS)
            except TimeoutError:
                yield KEEP_ALIVE

    def brief(self) -> dict[str, Any]:
        """Return the run as lists of runs show it."""
        return {"id": self.id, "workflow": self.flow.name, "status": self.status}

    def to_dict(self) -> dict[str, Any]:
        """Return the run's state; of an ended one with its result or error."""
        return {**self.brief(), "object": "run", **self.outcome}

    # the run's thread ---------------------------------------------------------------------------------------------

    def _post(self, event: RunEvent) -> None:
        if self._span:
            self._span.record(event)
        self._loop.call_soon_threadsafe(self._take, event)
        if self.is_cancelled:
            raise RequestError("run", self.id, "was cancelled")

    # the event loop -----------------------------------------------------------------------------------------------

    def _take(self, event: RunEvent) -> None:
        request = event.request_id
        if event.kind is EventKind.SUBMITTED:
            self.in_flight.add(request)
            if self.is_cancelled:
                self.service.threads.cancel([request])
        if event.completion:
            self.in_flight.discard(request)
        if event.kind is not EventKind.TEXT or event.text:
            data: dict[str, Any] = {"agent": event.agent, "turn": event.turn}
            if event.completion:
                data = _answered(event)
            elif event.kind is not EventKind.SUBMITTED:
                data["text"] = event.text
            self._add_event(event.kind, data)

    def _add_event(self, name: str, data: Mapping[str, Any]) -> None:
        """Append an event and wake the followers."""
        self.events.append(event(data, name=name, number=len(self.events)))
        self._news.set()
        self._news = asyncio.Event()

    def _end(self, ended: Future[RunResult]) -> None:
        self.tenant.give_back()
        del self.service.calls[self]
        error, status, data = ended.exception(), RunStatus.FAILED, dict[str, Any]()
        died = error and self.service.engine_error
        if error is None:
            status, result = RunStatus.FINISHED, ended.result()
            agents = [{**_answered(one), "tool_result": one.tool_result} for one in result.results]
            data = {"answer": result.text, "total_ms": result.total_ms, "agents": agents}
        elif self.is_cancelled and not died:
            status = RunStatus.CANCELLED
        else:
            error = died or error
            if not isinstance(error, KedgeError):
                logger.error("a run failed", exc_info=error)
            self.failure = replace(CallFailure.of(error), workflow=self.flow.name, run=self.id)
            data = self.failure.body()
            self.service.history.failed(self.tenant.id, self.failure)
        if self._span:
            self._span.ended(status.value, error if status is RunStatus.FAILED else None)
        self.status, self.outcome = status, data
        self.service.metrics.runs.labels(self.tenant.id).dec()
        self.service.metrics.ended_runs.labels(self.tenant.id, status).inc()
        self._add_event(status, data)

    def cancel(self) -> None:
        """Cancel the run; an ended one stays as it is."""
        if self.status is RunStatus.RUNNING:
            self.is_cancelled = True
            self.service.threads.cancel(list(self.in_flight))


def _answered(one: RunEvent | AgentResult) -> dict[str, Any]:
    assert one.completion
    about = {"agent": one.agent, "turn": one.turn, "text": one.text, "finish_reason": one.completion.finish_reason}
    return {**about, "receipt": receipt(one.completion)}


@router.post("/v1/workflows/{name}/runs", response_class=Response, responses=STREAMED | CREATED)
async def start(name: str, body: RunBody, caller: TheCaller) -> Response:
    """Start a run. With `stream`, the answer is its events, and a client that disconnects cancels it."""
    service, tenant = caller.service, caller.tenant
    flow, default = found("workflow", tenant.workflows, name), service.settings.reuse or ReuseMode.TRANSLATE
    for unknown in body.model_extra or {}:
        raise RequestError(unknown, "…", "must be one of inputs, reuse, guard, stream")

    def checked() -> Workflow:
        check_inputs(flow.workflow, body.inputs)
        for key, text in body.inputs.items():
            try:
                service.engine.tokenizer.measure(text)
            except PromptTooLong as error:
                raise PromptTooLong.of(f"inputs.{key}", error.tokens, error.most) from None
        return flow.for_run(default, body.reuse, body.guard)

    workflow = await service.threads.work(checked)
    service.admit(tenant, 1)
    served = ServerRun(service, tenant, workflow, body.inputs)
    tenant.runs[served.id] = served
    ended = [name for name, one in tenant.runs.items() if one.status is not RunStatus.RUNNING]
    for name in ended[:-REMEMBERED]:
        del tenant.runs[name]
    if body.stream:
        return EventStream(served.follow(), served.cancel)
    return JSONAnswer({**served.to_dict(), "events": f"/v1/runs/{served.id}/events"}, 201)


@router.get("/v1/runs")
async def all_runs(caller: TheCaller) -> Response:
    """List the tenant's running runs and the last ended ones."""
    return JSONAnswer({"object": "list", "data": [one.brief() for one in caller.tenant.runs.values()]})


@router.get("/v1/runs/{run}")
async def one_run(run: str, caller: TheCaller) -> Response:
    """Return a run; an ended one with its answers and receipts."""
    return JSONAnswer(found("run", caller.tenant.runs, run).to_dict())


@router.get("/v1/runs/{run}/events", response_class=Response, responses=STREAMED)
async def events(run: str, caller: TheCaller, last_event_id: Annotated[int | None, Header()] = None) -> Response:
    """Stream the past and future events of a run, from behind `Last-Event-ID` if that is given."""
    tenant, most = caller.tenant, caller.tenant.limits.requests_in_flight
    served: ServerRun = found("run", tenant.runs, run)
    if len(tenant.followed) >= most:
        raise LimitReached("followers", len(tenant.followed), f"at most {most} at once are allowed")
    tenant.followed.append(served)
    start = 0 if last_event_id is None else last_event_id + 1
    return EventStream(served.follow(start), partial(tenant.followed.remove, served))


@router.post("/v1/runs/{run}/cancel", status_code=202)
async def cancel(run: str, caller: TheCaller) -> Response:
    """Cancel a run; an ended one stays as it is."""
    served: ServerRun = found("run", caller.tenant.runs, run)
    served.cancel()
    return JSONAnswer(served.to_dict(), 202)


# hints ----------------------------------------------------------------------------------------------------------------


@router.post("/v1/hints")
async def hints(body: dict[str, Any], caller: TheCaller) -> Response:
    """Take hints without a prompt: a changed forecast, the end of a run, and hints about sessions.

    The answer has what becomes of each. A call counts one against the tenant's hints per minute, and one more for each
    agent in its forecast and each session that it expects.
    """
    service, tenant = caller.service, caller.tenant
    tenant.allowed_hints.require()
    given = service.hints(tenant, body, caller.request.headers)
    tenant.allowed_hints.use(1 + len(given.steps or ()) + len(given.expects or ()))
    namespace = tenant.namespace(given.salt)
    taken = service.client_runs.hint(namespace, given, tenant.workflows.get(given.workflow))
    taken += await asyncio.wrap_future(service.threads.wait(partial(service.engine.advise, namespace, given.turn)))
    return JSONAnswer({"object": "hints", "hints": given.to_dict(), "actions": outcomes(body, given, taken)})
