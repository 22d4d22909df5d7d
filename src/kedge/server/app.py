"""The application: routes, middleware, and what happens when the server starts and ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST

from kedge import __version__
from kedge.engine.base import Engine
from kedge.errors import EngineClosed
from kedge.server import guard
from kedge.server.anthropic import routes as anthropic_api
from kedge.server.dashboard import details as dashboard_details
from kedge.server.dashboard import routes as dashboard
from kedge.server.dashboard import traffic
from kedge.server.dashboard.routes import Dashboard
from kedge.server.dashboard.texts import text_policy
from kedge.server.http import errors
from kedge.server.http.body_limit import BodySizeLimit
from kedge.server.http.errors import ERRORS, answers
from kedge.server.http.hosts import HostCheck, TrustedHosts
from kedge.server.http.sse import JSONAnswer
from kedge.server.openai import routes as openai_api
from kedge.server.responses import routes as responses_api
from kedge.server.service import AnyCaller, Service, TheService
from kedge.server.snapshots import Snapshots
from kedge.server.telemetry.access_log import AccessLogMiddleware
from kedge.server.telemetry.tracing import NoTracing, Tracing
from kedge.server.tenancy import KeyRing, apply_quotas
from kedge.server.workflows import routes as workflow_api
from kedge.server.workflows.workflows import Workflows
from kedge.settings import ServerSettings
from kedge.types import RequestId

READY_SECONDS = 5.0


def create_app(
    engine: Engine,
    settings: ServerSettings | None = None,
    keys: KeyRing | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """Return the server as an ASGI application around an engine, which the caller closes.

    Without keys everyone may call. Loads the engine's saved state if the settings name a folder. Raises `ConfigError`
    if the engine, or the folder, cannot do what the settings ask for.
    """
    settings, tracing = settings or ServerSettings(), tracing or NoTracing()
    keys = keys or KeyRing({}, settings.limits)
    apply_quotas(engine, keys.tenants)
    watching = Dashboard(engine, text_policy(settings, keys))
    service = Service(watching.engine, settings, keys, tracing, watching.history.failed)
    app = FastAPI(title="Kedge", version=__version__, lifespan=_lifespan)
    app.state.service, app.state.workflows, app.state.dashboard = service, Workflows(service), watching
    app.state.snapshots = _snapshots(engine, service)
    apis = openai_api.router, responses_api.router, anthropic_api.router, workflow_api.router
    for router in (*apis, dashboard.router, dashboard_details.router, traffic.router, guard.router, _router):
        app.include_router(router)
    errors.install(app)
    app.add_middleware(HostCheck, hosts=TrustedHosts(settings.host, settings.allowed_hosts))
    app.add_middleware(BodySizeLimit, max_body_bytes=settings.max_body_bytes)
    app.add_middleware(AccessLogMiddleware, tracing=tracing)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    snapshots: Snapshots | None = app.state.snapshots
    if snapshots:
        snapshots.start()
    yield
    app.state.workflows.server_runs.cancel_all()
    await asyncio.to_thread(service.threads.shut)
    if snapshots:
        await asyncio.to_thread(snapshots.end)


def _snapshots(engine: Engine, service: Service) -> Snapshots | None:
    settings = service.settings
    if settings.state is None or engine.state == settings.state:
        return None
    snapshots = Snapshots(engine, settings.state, settings.snapshot_interval, service.metrics.snapshot)
    snapshots.load()
    return snapshots


_router = APIRouter(tags=["Operation"], responses=ERRORS)


@_router.get("/health", response_model=None)
async def health(service: TheService) -> Response:
    """Return 200 while the engine runs; after a 503 the process must be restarted."""
    service.require_engine()
    return JSONAnswer({"status": "ok"})


@_router.get("/ready", response_model=None)
async def ready(service: TheService) -> Response:
    """Return 200 if the engine responds; 503 if it has ended or is too busy, or if the server is ending."""
    service.refuse_at_the_end()
    service.require_engine()
    try:
        async with asyncio.timeout(READY_SECONDS):
            await service.threads.work(lambda: service.engine.cancel(RequestId("ready?")))
    except TimeoutError:
        raise EngineClosed("engine", "busy", f"did not answer within {READY_SECONDS:g} s") from None
    return JSONAnswer({"status": "ready", "model": service.model_name})


@_router.get("/metrics", response_model=None, response_class=Response, responses=answers(200, kinds=("text/plain",)))
async def metrics(service: TheService, caller: AnyCaller) -> Response:
    """Return metrics in Prometheus' text format: all of them for the operator or without keys, else the tenant's."""
    if not caller.is_operator:
        return Response(service.metrics.exposition(caller.id), headers={"Content-Type": CONTENT_TYPE_LATEST})
    await service.cache_metrics.refresh()
    text = service.metrics.exposition(None, service.cache_metrics)
    return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})
