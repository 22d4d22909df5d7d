"""Routes of workflows, their runs, and hints without a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Response

from kedge.errors import PromptTooLong, RequestError, SpecError
from kedge.guard import GuardMode
from kedge.hints.without_prompt import outcomes
from kedge.runner.prompts import compiled
from kedge.runner.run import check_inputs
from kedge.server.http import (
    ERRORS,
    EVENTS,
    JSON_TYPE,
    YAML,
    Body,
    EventStream,
    JSONAnswer,
    TypedRoute,
    accepted,
    answers,
    event,
)
from kedge.server.registry import MAX_WORKFLOWS, Registered, registered
from kedge.server.service import TheCaller
from kedge.server.workflows.server_runs import ServerRun, start_run
from kedge.settings.sections import shown_fidelity
from kedge.types import ReuseMode
from kedge.workflow.spec import parse_text

ReuseChoice = Literal["off", "exact", "translate"]
GuardChoice = Literal["off", "shadow", "on"]
RunReuse = Annotated[
    ReuseChoice | dict[str, ReuseChoice],
    accepted("'off', 'exact' or 'translate', or an object with one of these for each agent that it names"),
]


class RunBody(Body):
    """Request to start a run of a registered workflow."""

    inputs: dict[str, str]
    reuse: RunReuse | None = None
    """One mode for all agents without a mode of their own, or modes by agent, which override everything else."""
    guard: GuardChoice | None = None
    """Mode of the quality guard for all agents without one of their own."""
    stream: bool = False


router = APIRouter(tags=["Kedge"], responses=ERRORS, route_class=TypedRoute)
MAX_FILE_BYTES = 256 << 10
"""Limit of a workflow file, since YAML is slow to read."""
FILE = {
    "requestBody": {
        "required": True,
        "content": {kind: {"schema": {"type": "object"}} for kind in (JSON_TYPE, *YAML)},
    }
}


# workflows ------------------------------------------------------------------------------------------------------------


@router.post("/v1/workflows", openapi_extra=FILE, responses=answers(200, 201))
async def register(caller: TheCaller, reuse: ReuseChoice | None = None) -> Response:
    """Register the workflow file in the body (YAML, or JSON by its content type), or replace the one with its name.

    `reuse` is the mode of agents without a mode of their own.
    """
    service, request = caller.service, caller.request
    content, kind = await request.body(), request.headers.get("content-type", "")
    mode = ReuseMode(reuse) if reuse else None

    def build() -> Registered:
        if len(content) > MAX_FILE_BYTES:
            raise SpecError("body", f"{len(content)} bytes", f"a workflow file has at most {MAX_FILE_BYTES}")
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise SpecError(f"body: byte {error.start}", "…", "is not UTF-8") from None
        data = parse_text(text, ".json" if "json" in kind else ".yaml", "body", f"{len(content)} bytes")
        new = registered(data, mode, tools=service.settings.tools)
        prompts = compiled(new.workflow, service.engine.tokenizer)  # type: ignore[arg-type] # objects have a hash
        return replace(new, prompts=prompts)

    new = await service.threads.work(build)
    known, given = service.workflows.of(caller.tenant.id), new.workflow.name
    is_new = given not in known
    if is_new and len(known) >= MAX_WORKFLOWS:
        raise RequestError("name", given, f"at most {MAX_WORKFLOWS} workflows are kept: delete one")
    known[given] = new
    return JSONAnswer(_described(new), 201 if is_new else 200)


@router.get("/v1/workflows")
async def workflows(caller: TheCaller) -> Response:
    """List the tenant's workflows."""
    known = sorted(caller.service.workflows.of(caller.tenant.id).items())
    return JSONAnswer({"object": "list", "data": [_described(one) for _, one in known]})


@router.get("/v1/workflows/{name}")
async def workflow(name: str, caller: TheCaller) -> Response:
    """Return a workflow with its agents."""
    return JSONAnswer(_described(caller.service.workflows.get(caller.tenant.id, name)))


@router.delete("/v1/workflows/{name}")
async def delete(name: str, caller: TheCaller) -> Response:
    """Remove a workflow; its runs go on."""
    caller.service.workflows.get(caller.tenant.id, name)
    del caller.service.workflows.of(caller.tenant.id)[name]
    return JSONAnswer({"id": name, "object": "workflow", "deleted": True})


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
            "guard": agent.guard,
            "fidelity": shown_fidelity(agent.fidelity),
            "pick": agent.pick,
        }
        for agent_id in flow.order
        for agent in (flow.agent(agent_id),)
    ]
    head = {"id": flow.name, "object": "workflow", "inputs": flow.inputs, "turns": flow.turns, "reuse": one.reuse}
    return {**head, "agents": agents}


# runs -----------------------------------------------------------------------------------------------------------------


@router.post("/v1/workflows/{name}/runs", response_class=Response, responses=answers(200, kinds=EVENTS) | answers(201))
async def start(name: str, body: RunBody, caller: TheCaller) -> Response:
    """Start a run. With `stream`, the answer is its events, and a client that disconnects cancels it."""
    service, tenant = caller.service, caller.tenant
    found, default = service.workflows.get(tenant.id, name), service.settings.reuse or ReuseMode.TRANSLATE
    for unknown in body.model_extra or {}:
        raise RequestError(unknown, "…", "must be one of inputs, reuse, guard, stream")
    mode = ReuseMode(body.reuse) if isinstance(body.reuse, str) else None
    modes = {agent: ReuseMode(one) for agent, one in body.reuse.items()} if isinstance(body.reuse, dict) else {}

    def check() -> None:
        check_inputs(found.workflow, body.inputs)
        for key, text in body.inputs.items():
            try:
                service.engine.tokenizer.measure(text)
            except PromptTooLong as error:
                raise PromptTooLong.of(f"inputs.{key}", error.tokens, error.most) from None

    await service.threads.work(check)
    guard = GuardMode(body.guard) if body.guard else None
    served = start_run(service, tenant, found.for_run(default, mode, modes, guard), body.inputs)
    if body.stream:
        return EventStream(_events(served, 0), served.cancel)
    return JSONAnswer({**served.to_dict(), "events": f"/v1/runs/{served.id}/events"}, 201)


@router.get("/v1/runs")
async def all_runs(caller: TheCaller) -> Response:
    """List the tenant's running runs and the last ended ones."""
    known = caller.service.runs.of(caller.tenant.id).values()
    brief = [{"id": one.id, "workflow": one.workflow, "status": one.status} for one in known]
    return JSONAnswer({"object": "list", "data": brief})


@router.get("/v1/runs/{run}")
async def one_run(run: str, caller: TheCaller) -> Response:
    """Return a run; an ended one with its answers and receipts."""
    return JSONAnswer(caller.service.runs.get(caller.tenant.id, run).to_dict())


@router.get("/v1/runs/{run}/events", response_class=Response, responses=answers(200, kinds=EVENTS))
async def events(run: str, caller: TheCaller, last_event_id: Annotated[int | None, Header()] = None) -> Response:
    """Stream the past and future events of a run, from behind `Last-Event-ID` if that is given."""
    served = caller.service.runs.get(caller.tenant.id, run)
    return EventStream(_events(served, 0 if last_event_id is None else last_event_id + 1), lambda: None)


@router.post("/v1/runs/{run}/cancel", status_code=202)
async def cancel(run: str, caller: TheCaller) -> Response:
    """Cancel a run; an ended one stays as it is."""
    served = caller.service.runs.get(caller.tenant.id, run)
    served.cancel()
    return JSONAnswer(served.to_dict(), 202)


async def _events(served: ServerRun, start: int) -> AsyncIterator[bytes]:
    yield event({"id": served.id, "workflow": served.workflow}, name="run")
    async for one in served.follow(start):
        yield one


# hints ----------------------------------------------------------------------------------------------------------------


@router.post("/v1/hints")
async def hints(body: dict[str, Any], caller: TheCaller) -> Response:
    """Take hints without a prompt: a changed forecast, the end of a run, and what is said of sessions.

    The answer has what becomes of each. A call counts one against the tenant's hints per minute, and one more for each
    agent in its forecast and each session that it expects.
    """
    service, tenant = caller.service, caller.tenant
    allowed = service.meter(tenant).hints
    allowed.require()
    given = service.hints(tenant, body, caller.request.headers)
    allowed.use(1 + len(given.steps or ()) + len(given.expects or ()))
    namespace = tenant.namespace(given.salt)
    found = service.workflows.of(tenant.id).get(given.workflow)
    # The run that hints name may be their session alone, of which they bring no forecast.
    is_session = given.run == given.session and not (given.workflow or given.steps is not None or given.final)
    taken = [] if is_session else service.client_runs.hint(namespace, given, found)
    taken += await asyncio.wrap_future(service.threads.wait(partial(service.engine.advise, namespace, given.turn)))
    data = {"object": "hints", "hints": given.to_dict(), "actions": outcomes(body, given, taken)}
    return JSONAnswer(data)
