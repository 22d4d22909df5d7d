"""The application: routes, middleware, snapshots of what the engine has learned, and graceful shutdown.

At shutdown new work is refused, running work may finish, and what is left then fails. An engine that ends by itself
ends the server too: a supervisor restarts the process, which then loads its state.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from kedge import __version__
from kedge.engine.base import Engine
from kedge.engine.common.state.saving import Snapshots
from kedge.errors import ConfigError, EngineClosed, KedgeError
from kedge.server import anthropic, responses, workflows
from kedge.server.dashboard import routes as dashboard
from kedge.server.http import ERRORS, JSONAnswer, answer_error
from kedge.server.logs import AccessLogMiddleware
from kedge.server.middleware import BoundedConnection, HostCheck, open_files
from kedge.server.openai import generation
from kedge.server.service import BUNDLED_MODEL, Service
from kedge.server.tenancy import KeyRing
from kedge.server.threads import in_own_thread
from kedge.settings import ServerSettings

if TYPE_CHECKING:
    from kedge.server.tracing import OpenTelemetry


def create_app(
    engine: Engine,
    settings: ServerSettings | None = None,
    keys: KeyRing | None = None,
    tracing: OpenTelemetry | None = None,
) -> FastAPI:
    """Return the server as an ASGI application around an engine, which the caller closes.

    Without keys everyone may call. Loads the engine's saved state if the settings name a folder. Raises `ConfigError`
    if the engine, or the folder, cannot do what the settings ask for.
    """
    settings = settings or ServerSettings()
    if settings.tracing and tracing is None:
        try:
            from kedge.server.tracing import exporting
        except ImportError as error:
            raise ConfigError("server.tracing", error.name, "is not installed: pip install 'kedge[otel]'") from error
        tracing = exporting(settings.model_name or BUNDLED_MODEL)
    keys = keys or KeyRing({}, settings.limits)
    for tenant in keys.tenants:
        engine.limit(tenant.id, tenant.quota)
    service = Service(engine, settings, keys, tracing)
    # FastAPI's own pages run scripts of a CDN at the dashboard's origin
    handlers: Any = dict.fromkeys((KedgeError, RequestValidationError, HTTPException, Exception), answer_error)
    app = FastAPI(
        title="Kedge",
        version=__version__,
        lifespan=_lifespan,
        exception_handlers=handlers,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service, app.state.snapshots = service, None
    if settings.state is not None and engine.state != settings.state:
        app.state.snapshots = snapshots_of(engine, settings.state, service.metrics.snapshot)
        app.state.snapshots.load()
    for api in (generation, responses, anthropic, workflows, dashboard):
        app.include_router(api.router)
    app.include_router(_router)
    app.add_middleware(HostCheck, bound=settings.host, allowed=settings.allowed_hosts)
    app.add_middleware(AccessLogMiddleware, tracing=tracing)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    snapshots: Snapshots | None = app.state.snapshots
    if snapshots:
        snapshots.start()
    watching = asyncio.create_task(service.watch())
    yield
    watching.cancel()
    await service.shut()
    if snapshots and not service.is_hung:
        _, late = await asyncio.wait([in_own_thread(snapshots.close, "kedge-last-snapshot")], timeout=20)
        if late:
            logger.error("the last snapshot takes too long and is given up: the one before it is kept")


_router = APIRouter(tags=["Operation"], responses=ERRORS)


@_router.get("/health")
async def health(request: Request) -> Response:
    """Return 200 while the engine runs and takes steps; after a 503 the process must be restarted."""
    service: Service = request.app.state.service
    if error := service.engine_error:
        raise error
    if service.is_hung:
        raise EngineClosed("engine", "hung", "has taken no step for a minute, with work to do")
    return JSONAnswer({"status": "ok"})


@_router.get("/ready")
async def ready(request: Request) -> Response:
    """Return 200 if the engine responds; 503 if it has ended or is too busy, or if the server is ending."""
    service: Service = request.app.state.service
    service.refuse_at_the_end()
    if error := service.engine_error:
        raise error
    if not await service.answers(MARGIN_SECONDS):
        raise EngineClosed("engine", "busy", f"did not answer within {MARGIN_SECONDS:g} s")
    if service.is_closed:
        raise EngineClosed("engine", "closed", "it takes no requests")
    return JSONAnswer({"status": "ready", "model": service.model_name})


@_router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {"schema": {}}}}})
async def metrics(request: Request) -> Response:
    """Return metrics in Prometheus' text format: all of them for the operator or without keys, else the tenant's."""
    service: Service = request.app.state.service
    if (caller := service.authenticate(request)).is_operator:
        await service.cache_metrics.refresh()
    text = service.metrics.exposition(None if caller.is_operator else caller.id, service.cache_metrics)
    return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})


logger = logging.getLogger(__name__)


def snapshots_of(engine: Engine, folder: Path, count: Callable[[str], None]) -> Snapshots:
    """Return what saves an engine to a folder. Raises `ConfigError` for an engine that cannot be saved."""
    load, save = getattr(engine, "load", None), getattr(engine, "save", None)  # as those of `LocalEngine`
    if load is None or save is None:
        raise ConfigError("server.state", str(folder), f"{type(engine).__name__} has no state to save")
    return Snapshots(folder, partial(load, folder), partial(save, folder), "server.state", count)


MARGIN_SECONDS = 5
"""How long the engine's answer is waited for; after the grace, failed answers are sent for as long."""


class GracefulServer(uvicorn.Server):
    """Uvicorn server of an application of `create_app`; it stops accepting at SIGTERM and SIGINT.

    Calls that still run after the grace end with `engine_closed`: streams with an event and `[DONE]`, others with 503.
    They have no grace if the engine has ended by itself, which is checked ten times a second.
    """

    def __init__(self, app: FastAPI, on_failure: Callable[[], None] = lambda: None, **options: Any) -> None:
        """`on_failure` is called once the engine has ended by itself, or does not answer when the server is to end.
        `options` are those of `uvicorn.Config`.
        """
        self._on_failure = on_failure
        self._service: Service = app.state.service
        patience = math.ceil(self._service.settings.grace) + MARGIN_SECONDS
        # asyncio accepts a whole backlog at once, and up to four of them before it can cut a connection
        own = {"http": BoundedConnection, "backlog": open_files() // 16, "timeout_graceful_shutdown": patience}
        super().__init__(uvicorn.Config(app, **{**own, **options}))

    async def on_tick(self, counter: int) -> bool:
        if await super().on_tick(counter):
            return True
        if (failure := self._service.engine.failure) is not None:
            logger.critical("the engine ended by itself, and so does the server: %r", failure)
            self._on_failure()
        return failure is not None

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        self._service.is_ending = True
        grace, error = self._service.settings.grace, self._service.engine_error
        late = EngineClosed("server", "ending", f"the call ran for longer than {grace:g} s")
        for seconds in (0 if error else grace, MARGIN_SECONDS):
            last = time.monotonic() + seconds
            while self._service.in_flight and time.monotonic() < last:
                await asyncio.sleep(0.1)  # as often as Uvicorn looks; new calls are still answered, with 503
            self._service.fail_all(error or late)
        if not await self._service.answers(MARGIN_SECONDS):
            self._service.is_hung = True
            logger.critical("the engine does not answer, so nothing of it is saved")
            self._on_failure()
        await super().shutdown(sockets)
