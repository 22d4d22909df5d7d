"""What all routes share: the engine, who may call, what is registered, what goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request

from kedge.engine.base import Engine
from kedge.errors import EngineClosed, KedgeError, NotFound, Overloaded, Unauthenticated
from kedge.server.calls import Call, submit_all
from kedge.server.hints import Hints, read_hints
from kedge.server.openai.protocol import GenerationBody
from kedge.server.settings import ServerConfig
from kedge.server.telemetry.in_flight import InFlight
from kedge.server.telemetry.metrics import ServerMetrics
from kedge.server.telemetry.tracing import Span, Tracing
from kedge.server.tenancy import OPERATOR, KeyRing, Meter, Tenant, Ticket
from kedge.server.threads import Threads
from kedge.server.workflows.client_runs import AgentRuns
from kedge.server.workflows.registry import Workflows
from kedge.types import Completion, GenerateRequest, ReuseMode, TenantId


class Service:
    """One server. The event loop's thread owns it."""

    def __init__(self, engine: Engine, config: ServerConfig, keys: KeyRing, tracing: Tracing) -> None:
        self.engine, self.config, self.keys, self.tracing = engine, config, keys, tracing
        self.is_ending = False
        """Whether nothing new is taken any more."""
        self.threads = Threads(engine, config.max_in_flight)
        self.workflows = Workflows()
        self.agent_runs = AgentRuns(engine, self.default_mode(ReuseMode.TRANSLATE), self.threads.cancel)
        self.metrics = ServerMetrics(config.model_name, self.agent_runs.board)
        self.started = int(time.time())
        self._meters: dict[TenantId, Meter] = {}
        self._calls: set[Call] = set()

    # who calls, and how much --------------------------------------------------------------------------------------

    def meter(self, tenant: Tenant) -> Meter:
        """What the tenant has in flight and has used."""
        return self._meters.setdefault(tenant.id, Meter(tenant.limits))

    def admit(self, tenant: Tenant, count: int) -> Ticket:
        """Room for `count` generations. Raises `LimitReached`, `Overloaded`, or `RequestError` for too many at once."""
        self.refuse_at_the_end()
        ticket = self.meter(tenant).admit(count)
        if sum(meter.in_flight for meter in self._meters.values()) > self.config.max_in_flight:
            ticket.release()
            raise Overloaded("max_in_flight", self.config.max_in_flight, "the server has no room now")
        return ticket

    @property
    def is_quiet(self) -> bool:
        """Whether no generation is in flight, and no call is left whose end is to be booked."""
        return not self._calls and not any(meter.in_flight for meter in self._meters.values())

    def refuse_at_the_end(self) -> None:
        """Raises `Overloaded` once the server has been told to end."""
        if self.is_ending:
            raise Overloaded("server", "ending", "it takes nothing new")

    @property
    def engine_error(self) -> EngineClosed | None:
        """What everyone is answered once the engine has ended by itself; None while it works."""
        failure = self.engine.failure
        return None if failure is None else EngineClosed("engine", failure, "it ended by itself")

    def require_engine(self) -> None:
        """Raise `EngineClosed` once the engine has ended by itself."""
        if error := self.engine_error:
            raise error

    def fail_all(self, error: KedgeError) -> None:
        """Ends every call that goes on with an error."""
        for call in self._calls:
            call.fail(error)

    def check_model(self, model: str | None) -> None:
        """Raises `NotFound` for another model than the one that is served."""
        if model not in (None, self.config.model_name):
            raise NotFound("model", model, f"this server has {self.config.model_name}")

    def checked_hints(self, tenant: Tenant, body: GenerationBody, headers: Mapping[str, str]) -> Hints:
        """The hints of a body that asks for nothing that is not served. Raises `NotFound` or `RequestError`."""
        self.check_model(body.model)
        body.refuse_unsupported()
        return self.hints(tenant, body.hints, headers)

    def hints(self, tenant: Tenant, fields: Mapping[str, Any], headers: Mapping[str, str]) -> Hints:
        """The hints of a call; those that are ignored are counted. Raises as `read_hints` does."""
        hints, ignored = read_hints(fields, headers)
        self.metrics.ignored(tenant.id, ignored)
        return hints

    def default_mode(self, plain: ReuseMode) -> ReuseMode:
        """The server's own mode, or `plain` where it has none."""
        return self.config.reuse or plain

    async def begin(
        self,
        tenant: Tenant,
        count: int,
        build: Callable[[], Sequence[GenerateRequest]],
        on_over: Callable[[Call], None],
    ) -> Call:
        """Builds and submits `count` requests off the event loop, all of them or none. Whoever gets the call must
        `end` it. `on_over` is called when nothing of it is left in the engine.

        Raises what `admit`, `build` and the engine raise.
        """
        ticket = self.admit(tenant, count)
        span = self.tracing.generation(tenant.id)
        try:
            requests, streams = await self.threads.work(lambda: submit_all(self.engine, span.submitting(build())))
        except BaseException as error:  # whatever it is, the room is free again
            ticket.release()
            span.failed(error)
            raise
        in_flight = InFlight(self.metrics, tenant.id)
        for at in range(count):
            in_flight.submitted(at)
        call = Call(self.threads, requests, streams, _Account(self, tenant, ticket, in_flight, on_over, span))
        self._calls.add(call)
        return call

    def over(self, call: Call) -> None:
        """Nothing of a call is left in the engine."""
        self._calls.discard(call)

    def finished(self, tenant: Tenant, completion: Completion) -> None:
        """Counts a generation, and charges its tokens."""
        self.metrics.finished(tenant.id, completion)
        self.meter(tenant).tokens.use(completion.receipt.prompt_tokens + len(completion.tokens))


@dataclass(frozen=True, slots=True)
class _Account:
    """The books of one call, see `kedge.server.calls.Account`."""

    service: Service
    tenant: Tenant
    ticket: Ticket
    in_flight: InFlight
    on_over: Callable[[Call], None]
    span: Span

    def begun(self, at: int) -> None:
        self.span.begun()
        self.in_flight.begun(at)

    def finished(self, at: int, completion: Completion) -> None:
        # Before the client hears of it: one that then calls again at once finds the room free.
        self.ticket.give_back_one()
        self.in_flight.ended(at)
        self.service.finished(self.tenant, completion)

    def over(self, call: Call) -> None:
        self.ticket.release()
        self.in_flight.clear()
        self.span.ended([one for one in call.completions if one])
        self.on_over(call)
        self.service.over(call)


def service_of(request: Request) -> Service:
    """The service of the application that got a request."""
    service: Service = request.app.state.service
    return service


async def _service(request: Request) -> Service:
    return service_of(request)


async def _authenticated(request: Request) -> Tenant:
    tenant = service_of(request).keys.authenticate(request.headers.get("authorization"))
    request.state.tenant = tenant
    return tenant


async def _tenant(tenant: Annotated[Tenant, Depends(_authenticated)]) -> Tenant:
    if tenant.id == OPERATOR:
        raise Unauthenticated("Authorization", "…", "an operator's key reads metrics, and nothing else")
    return tenant


TheService = Annotated[Service, Depends(_service)]
TheTenant = Annotated[Tenant, Depends(_tenant)]
AnyCaller = Annotated[Tenant, Depends(_authenticated)]
"""A tenant or the operator."""
