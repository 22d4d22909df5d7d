"""What all routes share: who calls, the engine and its signs of life, what tenants have, and the running calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Request

from kedge.engine.base import Engine
from kedge.engine.common.watched import WatchedEngine
from kedge.errors import EngineClosed, KedgeError, NotFound, Overloaded, RequestError, Unauthenticated
from kedge.hints import Hints, read_hints
from kedge.server.client_runs import ClientRuns
from kedge.server.history import History
from kedge.server.http import CallFailure
from kedge.server.metrics import NO_TENANT, CacheMetrics, ServerMetrics
from kedge.server.tenancy import OPERATOR, KeyRing, Tenant
from kedge.server.threads import Threads, in_own_thread
from kedge.settings import ServerSettings
from kedge.types import Completion, RequestId, ReuseMode, TenantId

if TYPE_CHECKING:
    from kedge.server.tracing import OpenTelemetry

BUNDLED_MODEL = "kedge-nano"
"""The model's name for clients where the settings have none."""


class Service:
    """What one server's routes share. Belongs to the event loop."""

    def __init__(
        self, engine: Engine, settings: ServerSettings, keys: KeyRing, tracing: OpenTelemetry | None = None
    ) -> None:
        self._tenants = {one.id: one for one in keys.tenants}
        chosen = {one.id: one.keep_texts for one in keys.tenants if one.keep_texts is not None}
        self.history = History(keeps_texts=lambda tenant: chosen.get(tenant, settings.keep_texts), count=self._finished)
        self.engine: Engine = WatchedEngine(engine, self.history)
        self.settings, self.keys, self.tracing = settings, keys, tracing
        self.model_name = settings.model_name or BUNDLED_MODEL
        self.is_ending = False
        """Whether new work is refused."""
        self.threads = Threads(self.engine, settings.max_in_flight)
        self.metrics = ServerMetrics(self.model_name, self.history)
        self.cache_metrics = CacheMetrics(engine, self.threads)
        self.started = int(time.time())
        self.sampling: Mapping[str, Any] = {"temperature": 1.0, **engine.inspect().get("sampling", {})}
        """The sampling where a request sets nothing: the model's own, or else that of OpenAI's API"""
        self.is_hung = False
        """Whether the engine has not answered for a minute, with work to do"""
        self._sign: asyncio.Future[None] | None = None
        self.is_closed = False
        """Whether the engine's last sign was that it is closed"""
        self.client_runs = ClientRuns(self.engine, settings.reuse or ReuseMode.TRANSLATE)
        self.calls: dict[object, Callable[[KedgeError], None]] = {}
        """Callbacks that end a running call of the engine, or a run, with an error"""

    def authenticate(self, request: Request) -> Tenant:
        """Return who calls: a tenant, or the operator. Raises `Unauthenticated`."""
        tenant = request.state.tenant = self.keys.of_headers(request.headers)
        return tenant

    def admit(self, tenant: Tenant, count: int, field: str = "n") -> None:
        """Reserve room for `count` generations of a tenant, to which each of them is given back.

        Raises `LimitReached`, `Overloaded`, or `RequestError` naming `field` for more than may ever run at once.
        """
        self.refuse_at_the_end()
        if count > (most := min(tenant.limits.requests_in_flight, self.settings.max_in_flight)):
            raise RequestError(field, count, f"at most {most} generations at once are allowed")
        tenant.admit(count)
        if self.in_flight > self.settings.max_in_flight:
            tenant.give_back(count)
            raise Overloaded("max_in_flight", self.settings.max_in_flight, "the server has no room now")

    def receive(self, tenant: Tenant, count: int) -> None:
        """Count bytes of a tenant's body that have come. Raises `LimitReached`, or `Overloaded` for those of all."""
        most = self.settings.max_in_flight * self.settings.max_body_bytes
        if sum(one.body_bytes for one in self.keys.tenants) > most:
            raise Overloaded("body", most, f"at most {most} bytes at once are read")
        tenant.receive(count, self.settings.max_body_bytes)

    async def watch(self, every: float = 15.0, patience: float = 60.0) -> None:
        """Ask the engine for a sign of life while there is work. It answers between two steps."""
        while True:
            await asyncio.sleep(every)
            if self.in_flight and self.engine.failure is None:
                self.is_hung = not await self.answers(patience - every)
                while self.is_hung:
                    self.is_hung = not await self.answers(patience)

    async def answers(self, patience: float) -> bool:
        """Return whether the engine answers in so many seconds. It is asked once for all who want to know."""

        def ask() -> None:
            try:
                self.engine.cancel(RequestId("alive?"))
                self.is_closed = False
            except KedgeError:
                self.is_closed = True

        if self._sign is None or self._sign.done():
            self._sign = in_own_thread(ask, "kedge-sign")
        await asyncio.wait([self._sign], timeout=patience)
        return self._sign.done()

    @property
    def in_flight(self) -> int:
        """Generations and runs of all tenants that go on."""
        return sum(tenant.in_flight for tenant in self.keys.tenants)

    def refuse_at_the_end(self) -> None:
        """Raise `Overloaded` once the server is ending."""
        if self.is_ending:
            raise Overloaded("server", "ending", "it takes no new work")

    @property
    def engine_error(self) -> EngineClosed | None:
        """The error of every call once the engine has ended by itself; None while it works."""
        failure = self.engine.failure
        return None if failure is None else EngineClosed("engine", failure, "it ended by itself")

    async def shut(self, patience: float = 10.0) -> None:
        """End all calls and runs, and then the threads; those of a hung engine end when it is killed."""
        self.fail_all(EngineClosed("server", "ending", "the call was still running"))
        last = time.monotonic() + patience
        while self.calls and time.monotonic() < last:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(self.threads.shut, wait=not self.calls)

    def fail_all(self, error: KedgeError) -> None:
        """End every running call with an error, and every run."""
        for tell in list(self.calls.values()):
            tell(error)

    def check_model(self, model: str | None) -> None:
        """Raise `NotFound` for another model than the served one."""
        if model not in (None, self.model_name):
            raise NotFound("model", model, f"this server has {self.model_name}")

    def hints(self, tenant: Tenant, fields: Mapping[str, Any], headers: Mapping[str, str]) -> Hints:
        """Return the hints of a call and count the ignored ones. Raises like `read_hints`."""
        hints, ignored = read_hints(fields, headers)
        self.metrics.ignored(tenant.id, ignored)
        return hints

    def _finished(self, tenant: TenantId, completion: Completion) -> None:
        """Count a generation and charge its tokens. `History` calls it, once at a time."""
        self.metrics.finished(tenant, completion)
        self._tenants[tenant].allowed_tokens.use(completion.receipt.prompt_tokens + len(completion.tokens))

    def failed(self, tenant: TenantId | None, failure: CallFailure, *, is_listed: bool = True) -> None:
        """Count a call that was answered with an error, and report it; `tenant` is None where the key is unknown."""
        self.metrics.errors.labels(tenant or NO_TENANT, failure.status).inc()
        owner = tenant or (self.keys.tenants[0].id if self.keys.is_open else None)  # without keys, the one tenant
        if is_listed and owner is not None:
            self.history.failed(owner, failure)


@dataclass(frozen=True, slots=True)
class CallScope:
    """A call of a tenant, and what answers it."""

    request: Request
    service: Service
    tenant: Tenant


async def _caller(request: Request) -> CallScope:
    service: Service = request.app.state.service
    tenant: Tenant = getattr(request.state, "tenant", None) or service.authenticate(request)
    if tenant.id == OPERATOR:
        raise Unauthenticated("Authorization", "…", "must be a tenant's key: an operator's key only reads metrics")
    return CallScope(request, service, tenant)


TheCaller = Annotated[CallScope, Depends(_caller)]
