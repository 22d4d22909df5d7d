"""The application: routes, the edge that every call passes, and what happens when the server starts and ends."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kedge import __version__
from kedge.engine.base import Engine
from kedge.errors import EngineClosed
from kedge.server import dashboard, openai_api, problems, workflow_api
from kedge.server.config import ServerConfig
from kedge.server.dashboard import Dashboard
from kedge.server.problems import BAD, Problem, body_of
from kedge.server.runs import Runs
from kedge.server.service import AnyCaller, Service, TheService
from kedge.server.tenancy import KeyRing
from kedge.server.wire import JSONAnswer
from kedge.types import RequestId

DRAINED = 16
"""A body that is too large is read up to so many times the limit before it is refused, so that its sender hears it."""
BODY_SECONDS = 60.0
READY_SECONDS = 5.0


def create_app(engine: Engine, config: ServerConfig | None = None, keys: KeyRing | None = None) -> FastAPI:
    """The server as an ASGI application around an engine, which stays the caller's to close. Without keys everyone may
    call."""
    config = config or ServerConfig()
    watching = Dashboard(engine)
    service = Service(watching.engine, config, keys or KeyRing({}, config.limits))
    app = FastAPI(title="Kedge", version=__version__, lifespan=_lifespan)
    app.state.service, app.state.runs, app.state.dashboard = service, Runs(service), watching
    for router in (openai_api.router, workflow_api.router, dashboard.router, _router):
        app.include_router(router)
    problems.install(app)
    app.add_middleware(Edge, max_body_bytes=config.max_body_bytes)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    app.state.runs.cancel_all()
    await asyncio.to_thread(app.state.service.threads.shut)


_router = APIRouter(tags=["Operation"])


@_router.get("/health", response_model=None)
async def health() -> Response:
    """The server answers."""
    return JSONAnswer({"status": "ok"})


@_router.get("/ready", response_model=None)
async def ready(service: TheService) -> Response:
    """The engine answers too: 503 where it was closed, died, or does not come round to it in time."""
    try:
        async with asyncio.timeout(READY_SECONDS):
            await service.threads.work(lambda: service.engine.cancel(RequestId("ready?")))
    except TimeoutError:
        raise EngineClosed("engine", "busy", f"did not answer within {READY_SECONDS:g} s") from None
    return JSONAnswer({"status": "ready", "model": service.config.model_name})


@_router.get("/metrics", response_model=None)
async def metrics(service: TheService, caller: AnyCaller) -> Response:
    """Prometheus' text format: everything for the operator or where no keys are asked for, else a tenant's own."""
    text = service.metrics.exposition(None if caller.is_operator else caller.id)
    return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})


class Edge:
    """Bounds bodies, and gives every call an id, which its answer's `X-Request-Id` names."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app, self._most = app, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        tell = _with_id(send, f"req_{uuid.uuid4().hex}")
        if scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, tell)
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read(receive)
        except TimeoutError:
            await _refuse(408, "the body did not come in time", "request_timeout")(scope, receive, tell)
            return
        if body is None:
            return
        if len(body) > self._most:
            refusal = _refuse(413, f"a body has at most {self._most} bytes", "request_too_large")
            await refusal(scope, receive, tell)
            return
        await self._app(scope, _replayed(body, receive), tell)

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


def _with_id(send: Send, request_id: str) -> Send:
    async def tell(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
        await send(message)

    return tell


def _refuse(status: int, why: str, code: str) -> JSONAnswer:
    return JSONAnswer(body_of(why, Problem(status, BAD, code)), status)
