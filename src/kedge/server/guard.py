"""The states of the quality guard, with their evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from kedge.engine.base import Engine
from kedge.server.http.errors import ERRORS
from kedge.server.http.sse import JSONAnswer
from kedge.server.service import TheService, TheTenant
from kedge.types import Namespace, is_owned

router = APIRouter(tags=["Kedge"], responses=ERRORS)
SHOWN = ("mode", "max_changed", "agents")
"""What a tenant sees; counts of checks are of all tenants together, and in the operator's metrics."""


@router.get("/v1/guard", response_model=None)
async def guard(request: Request, service: TheService, tenant: TheTenant) -> Response:
    """Return how far the translation of the tenant's agents is trusted, by placeholder, and by what evidence.

    `mode` is null for an engine without a guard.
    """
    engine: Engine = request.app.state.dashboard.engine
    held = await service.threads.work(partial(_guard_of, engine, partial(is_owned, tenant.id)))
    return JSONAnswer({"object": "guard", "mode": None, "max_changed": None, "agents": [], **held})


def _guard_of(engine: Engine, owns: Callable[[Namespace], bool]) -> Mapping[str, Any]:
    held = engine.inspect_tenants(owns, []).get("guard", {})
    return {name: held[name] for name in SHOWN if name in held}
