"""Admission: the engine, the tenants' meters and the calls in flight with their bookkeeping, shared by all routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Request

from kedge.engine.base import Engine, Item, Stream
from kedge.engine.common.watched import WatchedEngine
from kedge.errors import EngineClosed, KedgeError, NotFound, Overloaded, Unauthenticated
from kedge.hints import ActionOutcome, Hints, read_hints
from kedge.server.history import History, text_policy
from kedge.server.http import CallFailure
from kedge.server.metrics import CacheMetrics, ServerMetrics
from kedge.server.tenancy import OPERATOR, KeyRing, Meter, Tenant, Ticket
from kedge.server.threads import Threads, in_own_thread
from kedge.server.tracing import GenerationSpan, OpenTelemetry
from kedge.settings import ServerSettings
from kedge.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    Namespace,
    RequestId,
    ReuseMode,
    SamplingParams,
    TenantId,
    TokenDelta,
    TurnHints,
)

BUNDLED_MODEL = "kedge-nano"
"""The model's name for clients where the settings have none."""


class Service:
    """Admission of one server. Belongs to the event loop."""

    def __init__(
        self,
        engine: Engine,
        settings: ServerSettings,
        keys: KeyRing,
        tracing: OpenTelemetry | None = None,
    ) -> None:
        self.history = History(keeps_texts=text_policy(settings, keys))
        self.engine = WatchedEngine(engine, self.history)
        self.settings, self.keys, self.tracing = settings, keys, tracing
        self.model_name = settings.model_name or BUNDLED_MODEL
        self.is_ending = False
        """Whether new work is refused."""
        self.threads = Threads(self.engine, settings.max_in_flight)
        self.metrics = ServerMetrics(self.model_name, self.history)
        self.cache_metrics = CacheMetrics(engine, self.threads)
        self.started = int(time.time())
        self._sampling: Mapping[str, Any] = engine.inspect().get("sampling", {})
        self.is_hung = False
        """Whether the engine has not answered for a minute, with work to do"""
        self._sign: asyncio.Future[None] | None = None
        self._is_closed = False
        """Whether the engine's last sign was that it is closed"""
        self._meters: dict[TenantId, Meter] = {}
        self.calls: set[GenerationCall] = set()

    def meter(self, tenant: Tenant) -> Meter:
        """Return the tenant's meter."""
        return self._meters.setdefault(tenant.id, Meter(tenant.limits))

    def admit(self, tenant: Tenant, count: int) -> Ticket:
        """Reserve room for `count` generations.

        Raises `LimitReached`, `Overloaded`, or `RequestError` for more than may ever run at once.
        """
        self.refuse_at_the_end()
        ticket = self.meter(tenant).admit(count)
        if self.in_flight > self.settings.max_in_flight:
            ticket.release()
            raise Overloaded("max_in_flight", self.settings.max_in_flight, "the server has no room now")
        return ticket

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
                self._is_closed = False
            except KedgeError:
                self._is_closed = True

        if self._sign is None or self._sign.done():
            self._sign = in_own_thread(ask, "kedge-sign")
        await asyncio.wait([self._sign], timeout=patience)
        return self._sign.done()

    async def require_answer(self, patience: float) -> None:
        """Raise `EngineClosed` where the engine does not answer in so many seconds, or that it is closed."""
        if not await self.answers(patience):
            raise EngineClosed("engine", "busy", f"did not answer within {patience:g} s")
        if self._is_closed:
            raise EngineClosed("engine", "closed", "it takes no requests")

    @property
    def is_quiet(self) -> bool:
        """Whether no generation is in flight, and no call is left whose end is to be booked."""
        return not self.calls and not self.in_flight

    @property
    def in_flight(self) -> int:
        """Generations and runs of all tenants that go on."""
        return sum(meter.in_flight for meter in self._meters.values())

    def refuse_at_the_end(self) -> None:
        """Raise `Overloaded` once the server is ending."""
        if self.is_ending:
            raise Overloaded("server", "ending", "it takes no new work")

    @property
    def engine_error(self) -> EngineClosed | None:
        """The error of every call once the engine has ended by itself; None while it works."""
        failure = self.engine.failure
        return None if failure is None else EngineClosed("engine", failure, "it ended by itself")

    def require_engine(self) -> None:
        """Raise `EngineClosed` once the engine has ended by itself."""
        if error := self.engine_error:
            raise error

    async def shut(self, patience: float = 10.0) -> None:
        """Wait for the end of all calls, and end the threads. Those of an engine that hangs end when it is killed."""
        last = time.monotonic() + patience
        while self.calls and time.monotonic() < last:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(self.threads.shut, wait=not self.calls)

    def fail_all(self, error: KedgeError) -> None:
        """End every running call with an error."""
        for call in self.calls:
            call.arrive(error)

    def check_model(self, model: str | None) -> None:
        """Raise `NotFound` for another model than the served one."""
        if model not in (None, self.model_name):
            raise NotFound("model", model, f"this server has {self.model_name}")

    def hints(self, tenant: Tenant, fields: Mapping[str, Any], headers: Mapping[str, str]) -> Hints:
        """Return the hints of a call and count the ignored ones. Raises like `read_hints`."""
        hints, ignored = read_hints(fields, headers)
        self.metrics.ignored(tenant.id, ignored)
        return hints

    async def advise(self, namespace: Namespace, hints: TurnHints) -> tuple[ActionOutcome, ...]:
        """Pass on what a client says of its sessions between requests. Returns what becomes of each hint."""
        return await asyncio.wrap_future(self.threads.wait(partial(self.engine.advise, namespace, hints)))

    def sampling(self, max_tokens: int) -> SamplingParams:
        """Return the sampling where a request sets nothing: the model's own, or else that of OpenAI's API."""
        return SamplingParams(max_tokens, **{"temperature": 1.0, **self._sampling})

    def default_mode(self, plain: ReuseMode) -> ReuseMode:
        """Return the reuse mode of the settings, or `plain` if they have none."""
        return self.settings.reuse or plain

    async def begin(
        self,
        tenant: Tenant,
        count: int,
        build: Callable[[], Sequence[GenerateRequest]],
        on_over: Callable[[GenerationCall], None],
    ) -> GenerationCall:
        """Build and submit `count` requests off the event loop, all of them or none.

        The caller must `end` the call. `on_over` is called when nothing of it is left in the engine. Raises what
        `admit`, `build` and the engine raise.
        """
        ticket = self.admit(tenant, count)
        span = self.tracing.generation(tenant.id) if self.tracing else None
        try:
            built = await self.threads.work(build)
            if span:
                span.submitting(built)
            submit = partial(submit_all, self.engine, built)
            if any(request.sampling.grammar for request in built):  # which may wait for others of its tenant to be read
                streams = await asyncio.wrap_future(self.threads.wait(submit))
            else:
                streams = await self.threads.work(submit)
        except BaseException as error:  # cancellation too must free the room
            ticket.release()
            if span:
                span.failed(error)
            raise
        call = GenerationCall(self, tenant, ticket, span, built, streams, on_over)
        self.calls.add(call)
        return call

    def finished(self, tenant: Tenant, completion: Completion) -> None:
        """Count a generation and charge its tokens."""
        self.metrics.finished(tenant.id, completion)
        self.meter(tenant).tokens.use(completion.receipt.prompt_tokens + len(completion.tokens))

    def failed(self, tenant: TenantId | None, failure: CallFailure) -> None:
        """Count a call that was answered with an error, and report it; `tenant` is None where the key is unknown."""
        self.metrics.failed(tenant or TenantId(""), failure.status)
        self.report_failure(tenant, failure)

    def report_failure(self, tenant: TenantId | None, failure: CallFailure) -> None:
        """Report what ended in an error. Where no keys are asked for, everything is the one tenant's."""
        owner = tenant or (self.keys.tenants[0].id if self.keys.is_open else None)
        if owner is not None:
            self.history.failed(owner, failure)


class GenerationCall:
    """Generations of one HTTP call, from the engine to the reader of the answer. Belongs to the event loop.

    A call that ends early cancels its remaining generations in the engine.
    """

    def __init__(
        self,
        service: Service,
        tenant: Tenant,
        ticket: Ticket,
        span: GenerationSpan | None,
        requests: Sequence[GenerateRequest],
        streams: Sequence[Stream],
        on_over: Callable[[GenerationCall], None],
    ) -> None:
        self._service, self._tenant, self._ticket, self._span, self._on_over = service, tenant, ticket, span, on_over
        self.requests = requests
        self.completions: list[Completion | None] = [None] * len(streams)
        self._ids = [stream.request_id for stream in streams]
        self._begun: set[int] = set()
        self._following, self._ended = len(streams), False
        self._arrived: list[tuple[int, TokenDelta] | BaseException] = []
        self._has_news = asyncio.Event()
        for at, stream in enumerate(streams):
            service.threads.follow(stream, partial(self._take, at))

    def _take(self, at: int, item: Item) -> None:
        """Book what has come of generation number `at`, and pass it on to the reader."""
        if isinstance(item, BaseException):
            self.arrive(item)
        else:
            if self._span and item.tokens and at not in self._begun:
                self._begun.add(at)
                self._span.begun()
            if item.completion:
                self.completions[at] = item.completion
                # Before the client gets the completion: if it calls again at once, the room is free.
                self._ticket.give_back_one()
                self._service.finished(self._tenant, item.completion)
            is_cancelled = item.completion and item.completion.finish_reason is FinishReason.CANCELLED
            self.arrive(EngineClosed("choice", at, "its generation was cancelled") if is_cancelled else (at, item))
            if not item.completion:
                return
        self._following -= 1
        if not self._following:
            self._ticket.release()
            if self._span:
                self._span.ended([one for one in self.completions if one])
            self._on_over(self)
            self._service.calls.discard(self)

    def arrive(self, item: tuple[int, TokenDelta] | BaseException) -> None:
        """Give the reader of `batches` a delta with its generation's number, or an error, which is raised there."""
        self._arrived.append(item)
        self._has_news.set()

    async def batches(self) -> AsyncIterator[list[tuple[int, TokenDelta]]]:
        """Yield the deltas that have arrived since the last batch, each with the number of its generation.

        Raises the first error of any generation, and `EngineClosed` if the engine cancelled one.
        """
        left = len(self._ids)
        while left:
            await self._has_news.wait()
            self._has_news.clear()
            arrived, self._arrived = self._arrived, []
            error = next((one for one in arrived if isinstance(one, BaseException)), None)
            before = arrived if error is None else arrived[: arrived.index(error)]
            deltas = [one for one in before if not isinstance(one, BaseException)]
            left -= sum(delta.completion is not None for _, delta in deltas)
            if deltas:
                yield deltas
            if error is not None:
                raise error

    async def finished(self) -> list[Completion]:
        """Return all completions. Raises like `batches`."""
        async for _ in self.batches():
            pass
        return [completion for completion in self.completions if completion is not None]

    def end(self) -> None:
        """Stop reading: cancel the generations that still run. Idempotent."""
        if not self._ended:
            self._ended = True
            left = [name for name, done in zip(self._ids, self.completions, strict=True) if done is None]
            self._service.threads.cancel(left)


def submit_all(engine: Engine, requests: Sequence[GenerateRequest]) -> list[Stream]:
    """Submit all requests or, if one is refused, none. Returns their streams."""
    streams: list[Stream] = []
    try:
        for request in requests:
            streams.append(engine.submit(request))
    except KedgeError:
        for stream in streams:
            engine.cancel(stream.request_id)
        raise
    return streams


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _authenticated(request: Request, service: Annotated[Service, Depends(_service)]) -> Tenant:
    tenant = request.state.tenant = service.keys.of_headers(request.headers)
    return tenant


async def _tenant(tenant: Annotated[Tenant, Depends(_authenticated)]) -> Tenant:
    if tenant.id == OPERATOR:
        raise Unauthenticated("Authorization", "…", "must be a tenant's key: an operator's key only reads metrics")
    return tenant


TheService = Annotated[Service, Depends(_service)]
TheTenant = Annotated[Tenant, Depends(_tenant)]
AnyCaller = Annotated[Tenant, Depends(_authenticated)]
"""A tenant or the operator."""
