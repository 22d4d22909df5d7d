"""Kedge's own routes: workflows, runs, and hints without a prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request, Response

from kedge.errors import RequestError, SpecError
from kedge.runner.prompts import compiled
from kedge.server import media_types
from kedge.server.errors import BODY_ERRORS, ERRORS, EVENTS, answers
from kedge.server.media_types import TypedRoute
from kedge.server.openai.protocol import ReuseChoice, RunBody
from kedge.server.service import TheService, TheTenant
from kedge.server.sse import EventStream, JSONAnswer, event
from kedge.server.workflows import drawing
from kedge.server.workflows.registry import Registered, registered
from kedge.server.workflows.server_runs import Runs, ServedRun
from kedge.types import ReuseMode
from kedge.workflow.spec import parse_text

router = APIRouter(tags=["Kedge"], responses=ERRORS, route_class=TypedRoute)
MOST_BYTES = 256 << 10
"""Of a workflow file: YAML is slow to read."""
PICTURES = ("image/svg+xml", "text/plain")
STILL_THERE = b": still there\n\n"
FILE = {
    "requestBody": {
        "required": True,
        "content": {kind: {"schema": {"type": "object"}} for kind in (media_types.JSON, *media_types.YAML)},
    }
}


# workflows ------------------------------------------------------------------------------------------------------------


@router.post("/v1/workflows", response_model=None, openapi_extra=FILE, responses=answers(200, 201) | BODY_ERRORS)
async def register(
    request: Request,
    service: TheService,
    tenant: TheTenant,
    reuse: ReuseChoice | None = None,
    judge: Annotated[list[str], Query()] = [],  # noqa: B006 (FastAPI copies it)
) -> Response:
    """Registers the workflow file in the body (YAML, or JSON by its content type), in place of one with its name.

    `reuse` is for its agents that have no mode of their own; an agent named as a `judge` is never translated unless a
    request names it and asks for it.
    """
    content, kind = await request.body(), request.headers.get("content-type", "")
    mode = ReuseMode(reuse) if reuse else None

    def build() -> Registered:
        new = registered(_parsed(content, kind), mode, frozenset(judge), tools=service.config.tools)
        prompts = compiled(new.workflow, service.engine.tokenizer)  # type: ignore[arg-type] # objects have a hash
        return replace(new, prompts=prompts)

    new = await service.threads.work(build)
    is_new = service.workflows.put(tenant.id, new)
    return JSONAnswer(_described(new), 201 if is_new else 200)


@router.get("/v1/workflows", response_model=None)
async def workflows(service: TheService, tenant: TheTenant) -> Response:
    """The tenant's workflows."""
    return JSONAnswer({"object": "list", "data": [_described(one) for one in service.workflows.all(tenant.id)]})


@router.get("/v1/workflows/{name}", response_model=None)
async def workflow(name: str, service: TheService, tenant: TheTenant) -> Response:
    """A workflow with its agents."""
    return JSONAnswer(_described(service.workflows.get(tenant.id, name)))


@router.get(
    "/v1/workflows/{name}/graph", response_model=None, response_class=Response, responses=answers(200, kinds=PICTURES)
)
async def graph(name: str, service: TheService, tenant: TheTenant, format: Literal["svg", "text"] = "svg") -> Response:
    """Who reads whose answers, as a picture or as text."""
    found = service.workflows.get(tenant.id, name).workflow
    if format == "text":
        return Response(drawing.text(found), media_type="text/plain")
    return Response(drawing.svg(found), media_type="image/svg+xml")


@router.delete("/v1/workflows/{name}", response_model=None)
async def delete(name: str, service: TheService, tenant: TheTenant) -> Response:
    """Forgets a workflow; runs of it go on."""
    service.workflows.remove(tenant.id, name)
    return JSONAnswer({"id": name, "object": "workflow", "deleted": True})


def _parsed(content: bytes, kind: str) -> object:
    if len(content) > MOST_BYTES:
        raise SpecError("body", f"{len(content)} bytes", f"a workflow file has at most {MOST_BYTES}")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"body: byte {error.start}", "…", "is not UTF-8") from None
    return parse_text(text, ".json" if "json" in kind else ".yaml", "body", f"{len(content)} bytes")


def _described(one: Registered) -> dict[str, Any]:
    flow = one.workflow
    agents = [
        {
            "id": agent.id,
            "title": agent.title,
            "waits_for": [other for other in flow.order if other in flow.waits_for[agent_id]],
            "reads": [placeholder.name for placeholder in agent.placeholders],
            "tool": agent.tool is not None,
            "reuse": agent.reuse,
            "judge": agent.id in one.judges,
        }
        for agent_id in flow.order
        for agent in (flow.agent(agent_id),)
    ]
    head = {"id": flow.name, "object": "workflow", "inputs": flow.inputs, "turns": flow.turns, "reuse": one.reuse}
    return {**head, "agents": agents}


# runs -----------------------------------------------------------------------------------------------------------------


@router.post(
    "/v1/workflows/{name}/runs",
    response_model=None,
    response_class=Response,
    responses=answers(200, kinds=EVENTS) | answers(201) | BODY_ERRORS,
)
async def start(name: str, body: RunBody, request: Request, service: TheService, tenant: TheTenant) -> Response:
    """Starts a run. With `stream`, its events are the answer, and a client that goes away ends it."""
    found, default = service.workflows.get(tenant.id, name), service.default_mode(ReuseMode.TRANSLATE)
    _refuse_unknown(body)
    runs = runs_of(request)
    served = runs.start(tenant, found.for_run(default, body.mode, body.modes), body.inputs)
    if body.stream:
        return EventStream(_events(served, 0), lambda: runs.cancel(served))
    return JSONAnswer({**served.as_json(), "events": f"/v1/runs/{served.id}/events"}, 201)


@router.get("/v1/runs", response_model=None)
async def all_runs(request: Request, tenant: TheTenant) -> Response:
    """The tenant's runs that go on, and the last ones that have ended."""
    brief = [{"id": one.id, "workflow": one.workflow, "status": one.status} for one in runs_of(request).all(tenant)]
    return JSONAnswer({"object": "list", "data": brief})


@router.get("/v1/runs/{run}", response_model=None)
async def one_run(run: str, request: Request, tenant: TheTenant) -> Response:
    """A run as it is now; an ended one with its answers and receipts."""
    return JSONAnswer(runs_of(request).get(tenant, run).as_json())


@router.get("/v1/runs/{run}/events", response_model=None, response_class=Response, responses=answers(200, kinds=EVENTS))
async def events(
    run: str, request: Request, tenant: TheTenant, last_event_id: Annotated[int | None, Header()] = None
) -> Response:
    """What happened in a run, and what happens, as server-sent events; after `Last-Event-ID` if that is given."""
    served = runs_of(request).get(tenant, run)
    return EventStream(_events(served, 0 if last_event_id is None else last_event_id + 1), lambda: None)


@router.post("/v1/runs/{run}/cancel", response_model=None, status_code=202)
async def cancel(run: str, request: Request, tenant: TheTenant) -> Response:
    """Ends a run soon; one that has ended stays as it is."""
    served = runs_of(request).get(tenant, run)
    runs_of(request).cancel(served)
    return JSONAnswer(served.as_json(), 202)


async def _events(served: ServedRun, start: int) -> AsyncIterator[bytes]:
    yield event({"id": served.id, "workflow": served.workflow}, name="run")
    async for item in served.follow(start):
        yield STILL_THERE if item is None else event(item[1].data, name=item[1].name, number=item[0])


def runs_of(request: Request) -> Runs:
    """The runs of the application that got a request."""
    runs: Runs = request.app.state.runs
    return runs


def _refuse_unknown(body: RunBody) -> None:
    for name in body.model_extra or {}:
        raise RequestError(name, "…", "a run has only inputs, reuse and stream")


# hints ----------------------------------------------------------------------------------------------------------------


@router.post("/v1/hints", response_model=None, responses=BODY_ERRORS)
async def hints(body: dict[str, Any], request: Request, service: TheService, tenant: TheTenant) -> Response:
    """Takes hints without a prompt: a forecast that has changed, or the end of a run.

    Of the tenant's hints a minute, a call costs one, and one more for each agent that its forecast speaks of.
    """
    allowed = service.meter(tenant).hints
    allowed.require()
    said = service.hints(tenant, body, request.headers)
    allowed.use(1 + len(said.steps or ()))
    service.agent_runs.require_room(tenant.namespace(said.salt), said)
    found = service.workflows.find(tenant.id, said.workflow)
    run = service.agent_runs.touch(tenant.namespace(said.salt), said, found)
    if run and said.final:
        service.agent_runs.end(run)
    elif run:
        service.agent_runs.look_ahead(run)
    return JSONAnswer({"object": "hints", "hints": said.told()})
