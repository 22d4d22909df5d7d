"""What was found in plain traffic, as a page and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from kedge.discovery.page import page
from kedge.engine.base import Engine
from kedge.server.http.errors import ERRORS
from kedge.server.http.sse import JSONAnswer
from kedge.server.service import Service, TheService, TheTenant
from kedge.server.tenancy import Tenant
from kedge.types import is_owned

router = APIRouter(tags=["Operation"], responses=ERRORS)


@router.get("/kedge", response_model=None, response_class=HTMLResponse)
async def traffic_page(request: Request, service: TheService, tenant: TheTenant) -> Response:
    """Show what was found in the tenant's plain requests: agents, who follows whom, and what defeats reuse."""
    return HTMLResponse(page(await _report(request, service, tenant)))


@router.get("/kedge/report", response_model=None)
async def traffic_report(request: Request, service: TheService, tenant: TheTenant) -> Response:
    """Return the same as JSON; null for an engine that does not look at plain requests in this process."""
    return JSONAnswer(await _report(request, service, tenant))


async def _report(request: Request, service: Service, tenant: Tenant) -> Mapping[str, Any] | None:
    engine: Engine = request.app.state.dashboard.engine
    return await service.threads.work(partial(engine.traffic, partial(is_owned, tenant.id)))
