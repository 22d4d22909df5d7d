"""What was found in plain traffic, as a page and as JSON."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from kedge.discovery.page import page
from kedge.engine.base import Inspectable
from kedge.server.http.errors import ERRORS
from kedge.server.http.sse import JSONAnswer
from kedge.server.service import Service, TheService, TheTenant
from kedge.server.tenancy import Tenant
from kedge.types import is_owned

router = APIRouter(tags=["Operation"], responses=ERRORS)


@router.get("/kedge", response_model=None, response_class=HTMLResponse)
async def traffic_page(request: Request, service: TheService, tenant: TheTenant) -> Response:
    """Show what was found in the tenant's plain requests: agents, who follows whom, and what defeats reuse."""
    return HTMLResponse(page(await _report(request.app.state.dashboard.inspected, service, tenant)))


@router.get("/kedge/report", response_model=None)
async def traffic_report(request: Request, service: TheService, tenant: TheTenant) -> Response:
    """Return the same as JSON; null for an engine that does not look at plain requests in this process."""
    return JSONAnswer(await _report(request.app.state.dashboard.inspected, service, tenant))


async def _report(engine: Inspectable | None, service: Service, tenant: Tenant) -> dict[str, Any] | None:
    if engine is None:
        return None
    seen = await service.threads.work(partial(engine.inspect_tenants, partial(is_owned, tenant.id), []))
    report: dict[str, Any] | None = dict(seen).get("traffic")
    return report
