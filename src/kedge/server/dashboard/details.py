"""The dashboard's details: one run with its calls, and one call with its text where that is kept."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response

from kedge.errors import NotFound
from kedge.server.dashboard.routes import Dashboard, add_outcomes
from kedge.server.http.sse import JSONAnswer
from kedge.server.service import TheService, TheTenant
from kedge.server.workflows.workflows import TheWorkflows

router = APIRouter(tags=["Dashboard"])
FORGOTTEN = "the dashboard remembers only the last ones"


@router.get("/v1/dashboard/runs/{number}", include_in_schema=False, response_model=None)
async def run(number: int, request: Request, workflows: TheWorkflows, tenant: TheTenant) -> Response:
    """A run of the tenant, by its number on the dashboard, with its calls and their receipts."""
    dashboard: Dashboard = request.app.state.dashboard
    found = dashboard.history.run(tenant.id, number)
    if found is None:
        raise NotFound("run", number, FORGOTTEN)
    add_outcomes([found], workflows, tenant)
    return JSONAnswer(found)


@router.get("/v1/dashboard/calls/{number}", include_in_schema=False, response_model=None)
async def call(number: int, request: Request, service: TheService, tenant: TheTenant) -> Response:
    """A call of the tenant, by its number on the dashboard. `text` is null where it is not kept."""
    dashboard: Dashboard = request.app.state.dashboard
    found = dashboard.history.call(tenant.id, number)
    if found is None:
        raise NotFound("call", number, FORGOTTEN)
    details, text = found
    decoded = await service.threads.work(partial(text.to_dict, service.engine.tokenizer)) if text else None
    return JSONAnswer({**details, "text": decoded, "keeps_texts": dashboard.history.keeps_texts(tenant.id)})
