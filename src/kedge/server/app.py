"""The application: routes, the edge that every call passes, and what happens when the server starts and ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kedge import __version__
from kedge.engine.base import Engine
from kedge.errors import EngineClosed
from kedge.server import errors as problems
from kedge.server.dashboard import routes as dashboard
from kedge.server.dashboard.routes import Dashboard
from kedge.server.errors import ERRORS, answers, refusal
from kedge.server.hosts import HostCheck, TrustedHosts
from kedge.server.openai import routes as openai_api
from kedge.server.service import AnyCaller, Service, TheService
from kedge.server.settings import ServerConfig
from kedge.server.snapshots import Snapshots
from kedge.server.sse import JSONAnswer
from kedge.server.telemetry.access_log import Observed
from kedge.server.telemetry.tracing import NoTracing, Tracing
from kedge.server.tenancy import KeyRing, apply_quotas
from kedge.server.workflows import routes as workflow_api
from kedge.server.workflows.server_runs import Runs
from kedge.types import RequestId

DRAINED = 16
"""A body that is too large is read up to so many times the limit before it is refused, so that its sender hears it."""
BODY_SECONDS = 60.0
READY_SECONDS = 5.0


def create_app(
    engine: Engine,
    config: ServerConfig | None = None,
    keys: KeyRing | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """The server as an ASGI application around an engine, which stays the caller's to close. Without keys everyone may
    call. Loads the engine's state, if it is to be kept. Raises `ConfigError` where the engine, or the folder for its
    state, cannot do what the settings ask for."""
    config, tracing = config or ServerConfig(), tracing or NoTracing()
    keys = keys or KeyRing({}, config.limits)
    apply_quotas(engine, keys.tenants)
    watching = Dashboard(engine)
    service = Service(watching.engine, config, keys, tracing)
    app = FastAPI(title="Kedge", version=__version__, lifespan=_lifespan)
    app.state.service, app.state.runs, app.state.dashboard = service, Runs(service), watching
    app.state.snapshots = _snapshots(engine, service)
    for router in (openai_api.router, workflow_api.router, dashboard.router, _router):
        app.include_router(router)
    problems.install(app)
    app.add_middleware(HostCheck, hosts=TrustedHosts(config.host, config.allowed_hosts))
    app.add_middleware(Edge, max_body_bytes=config.max_body_bytes)
    app.add_middleware(Observed, tracing=tracing)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    snapshots: Snapshots | None = app.state.snapshots
    if snapshots:
        snapshots.start()
    yield
    app.state.runs.cancel_all()
    await asyncio.to_thread(service.threads.shut)
    if snapshots:
        await asyncio.to_thread(snapshots.end)


def _snapshots(engine: Engine, service: Service) -> Snapshots | None:
    config = service.config
    if config.state is None:
        return None
    snapshots = Snapshots(engine, config.state, config.snapshot_interval, service.metrics.snapshot)
    snapshots.load()
    return snapshots


_router = APIRouter(tags=["Operation"], responses=ERRORS)


@_router.get("/health", response_model=None)
async def health(service: TheService) -> Response:
    """The server answers, and its engine has not ended by itself: after a 503 the process is to be started again."""
    service.require_engine()
    return JSONAnswer({"status": "ok"})


@_router.get("/ready", response_model=None)
async def ready(service: TheService) -> Response:
    """The engine answers too: 503 where it was closed, died, or does not come round to it in time, and at the end."""
    service.refuse_at_the_end()
    service.require_engine()
    try:
        async with asyncio.timeout(READY_SECONDS):
            await service.threads.work(lambda: service.engine.cancel(RequestId("ready?")))
    except TimeoutError:
        raise EngineClosed("engine", "busy", f"did not answer within {READY_SECONDS:g} s") from None
    return JSONAnswer({"status": "ready", "model": service.config.model_name})


@_router.get("/metrics", response_model=None, response_class=Response, responses=answers(200, kinds=("text/plain",)))
async def metrics(service: TheService, caller: AnyCaller) -> Response:
    """Prometheus' text format: everything for the operator or where no keys are asked for, else a tenant's own."""
    text = service.metrics.exposition(None if caller.is_operator else caller.id)
    return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})


class Edge:
    """Bounds bodies."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app, self._most = app, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read(receive)
        except TimeoutError:
            await refusal(408, "the body did not come in time", "request_timeout")(scope, receive, send)
            return
        if body is None:
            return
        if len(body) > self._most:
            too_large = refusal(413, f"a body has at most {self._most} bytes", "request_too_large")
            await too_large(scope, receive, send)
            return
        await self._app(scope, _replayed(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body, or a little more than is allowed of it; None where the client has gone."""
        body, size = bytearray(), 0
        while (message := await receive())["type"] == "http.request":
            chunk = message.get("body", b"")
            size += len(chunk)
            if len(body) <= self._most:
                body += chunk
            if not message.get("more_body") or size > DRAINED * self._most:
                return bytes(body)
        return None


def _replayed(body: bytes, receive: Receive) -> Receive:
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return waiting.pop() if waiting else await receive()

    return next_message
