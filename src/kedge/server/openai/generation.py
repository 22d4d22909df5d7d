"""From a call's body to its answer: hints, the engine's requests, the run that they belong to, whole or streamed.

The routes of OpenAI's completions and models are here; other dialects' call `answer` with their own bodies and writers.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Response

from kedge.checks import brief
from kedge.engine.base import Item, Stream
from kedge.errors import (
    EmptyPrompt,
    EngineClosed,
    InvalidGrammar,
    InvalidToken,
    KedgeError,
    PromptTooLong,
    RequestError,
)
from kedge.guard import GuardOrders
from kedge.hints import Hints
from kedge.hints.values import MAX_EXPECTED
from kedge.server.client_runs import ClientRun, values_for
from kedge.server.http import ERRORS, STREAMED, CallFailure, EventStream, JSONAnswer, TypedRoute, receipt, sent_as
from kedge.server.logs import CLIENT_GONE
from kedge.server.openai import prompts
from kedge.server.openai.protocol import COMPLETION_MAX_TOKENS, AnyBody, CallBody, ChatBody, CompletionBody
from kedge.server.openai.tool_calls import PARSERS, AnswerReader, grammar_of
from kedge.server.openai.writers import AnswerWriter, CompletionsWriter
from kedge.server.service import CallScope, Service, TheCaller
from kedge.server.tenancy import found
from kedge.types import (
    ClientId,
    Completion,
    FinishReason,
    GenerateRequest,
    RequestId,
    ReuseMode,
    SamplingParams,
    TokenDelta,
    ValueKind,
)
from kedge.workflow.graph import Step

if TYPE_CHECKING:
    from kedge.server.tracing import GenerationSpan


async def answer(given: CallBody, writer: AnswerWriter, caller: CallScope) -> Response:
    """Answer a call. Raises `NotFound` for another model, and `RequestError` for what cannot be served."""

    def read() -> tuple[AnyBody, Hints, str]:
        """Return the body with its hints and the answer's grammar."""
        body, service = given.chat(), caller.service
        if body is not given and body.choices_per_prompt > 1:
            raise RequestError("n", body.n, "this protocol's answers have one choice")
        service.check_model(body.model)
        body.refuse_unsupported()
        hints = caller.request.state.hints = service.hints(caller.tenant, body.hints, caller.request.headers)
        body.left_out.extend(hints.ignored)
        if not isinstance(body, ChatBody):
            return body, hints, ""
        body.left_out.extend(body.unread)
        return body, hints, grammar_of(body, service.settings.tool_call_parser, service.engine.tokenizer)

    with sent_as(given.sent):
        call = Generation(caller, *await caller.service.threads.work(read))
        await call.begin()
        writer.body, writer.requests, writer.completions = call.body, call.requests, call.completions
        if call.body.stream:
            return EventStream(_events(call, writer, given.sent), call.end)
        if not await call.is_awaited():
            return Response(status_code=CLIENT_GONE)

    def whole() -> dict[str, Any]:
        done = [one for one in call.completions if one]
        deltas = [TokenDelta(one.text, one.tokens, one, one.logprobs, one.prompt_logprobs) for one in done]
        pairs = [(call.reader().push(delta), delta) for delta in deltas]
        return {**writer.whole(pairs), "kedge": call.kedge()}

    is_long = call.body.top_logprobs_count is not None
    return JSONAnswer(await caller.service.threads.work(whole) if is_long else whole())


async def _events(call: Generation, writer: AnswerWriter, sent: Mapping[str, str]) -> AsyncIterator[bytes]:
    readers, left = [call.reader() for _ in call.requests], len(call.requests)

    def written(batch: Sequence[tuple[int, TokenDelta]], kedge: Mapping[str, Any] | None) -> bytes:
        events = bytearray()
        for at, delta in batch:
            pair = readers[at].push(delta), delta
            events += b"".join(writer.add(at, pair, kedge if delta is batch[-1][1] else None))
        return bytes(events)

    if begun := writer.begin():
        yield begun
    try:
        with sent_as(sent):
            async for batch in call.batches():
                left -= sum(delta.completion is not None for _, delta in batch)
                write = partial(written, batch, None if left else call.kedge())
                is_long = any(delta.prompt_logprobs for _, delta in batch)  # a prompt's are not for the event loop
                if events := await call.caller.service.threads.work(write) if is_long else write():
                    yield events
    except KedgeError as error:
        yield failure(writer, error, call.caller)
    if writer.last:
        yield writer.last


def failure(writer: AnswerWriter, error: KedgeError, caller: CallScope) -> bytes:
    """Return the end of a stream of which a call has failed, and count the call."""
    failed = CallFailure.of(error).at(caller.request)
    caller.service.failed(caller.tenant.id, failed)
    return b"".join(writer.failed(failed.body()))


class Generation:
    """The generations that one body asks for, from its hints to the reader of the answer. Belongs to the event loop.

    A call that ends early cancels its remaining generations in the engine.
    """

    requests: Sequence[GenerateRequest] = ()
    run: ClientRun | None = None
    step: Step | None = None
    """The turn of the agent whose template is filled"""
    _span: GenerationSpan | None = None

    def __init__(self, caller: CallScope, body: AnyBody, hints: Hints, grammar: str) -> None:
        """Of a conversation, of texts or token ids as they stand, or, where the hints have bindings, of a registered
        agent's filled template. `grammar` is the answer's.

        Raises `RequestError`, or `NotFound` for bindings of an unknown workflow or agent.
        """
        self.caller, self.body, self.hints = caller, body, hints
        service, tenant = caller.service, caller.tenant
        tools = len(body.tools_to_use) if isinstance(body, ChatBody) else 0
        if tools and service.settings.tool_call_parser is None:
            raise RequestError("tools", tools, "this server reads no tool calls (--tool-call-parser)")
        if hints.bindings is None:
            registered = tenant.workflows.get(hints.workflow)
            agent = registered.agent(hints.agent) if registered and hints.agent in registered.workflow.ids else None
            is_chat, mode = isinstance(body, ChatBody), service.settings.reuse or ReuseMode.EXACT
            most = service.settings.default_max_tokens if is_chat else COMPLETION_MAX_TOKENS
            sampling = SamplingParams(most, **service.sampling)
        else:
            if not isinstance(body, ChatBody):
                raise RequestError("kedge.bindings", "…", "templates are filled in /v1/chat/completions")
            for name, many in (("tools", tools), ("messages", len(body.messages))):
                if many:
                    raise RequestError(name, many, "with kedge.bindings the agent's template is the prompt")
            registered = found("workflow", tenant.workflows, hints.workflow)
            agent, mode = registered.agent(hints.agent), service.settings.reuse or ReuseMode.TRANSLATE
            sampling = agent.sampling
        self.registered, self.agent = registered, agent
        self.mode = hints.reuse or (registered.mode(agent, mode) if registered and agent else mode)
        self.sampling = body.sampling(replace(sampling, grammar=grammar))
        self.completions: list[Completion | None] = []
        self._arrived: asyncio.Queue[tuple[int, TokenDelta] | BaseException] = asyncio.Queue()
        self.arrive = self._arrived.put_nowait
        """Gives the reader of `batches` a delta with its generation's number, or an error, which is raised there."""

    async def begin(self) -> None:
        """Build and submit all requests, off the event loop. If that raises, none is submitted, and the run is as it
        was before.
        """
        hints, service, tenant, agent = self.hints, self.caller.service, self.caller.tenant, self.hints.agent
        fills, threads = hints.bindings is not None, service.threads

        def submit() -> list[Stream]:
            """Build and submit all requests or, if one is refused, none."""
            self.requests = self._requests()
            if self._span:
                self._span.submitting(self.requests)
            streams: list[Stream] = []
            try:
                for request in self.requests:
                    streams.append(service.engine.submit(request))
            except KedgeError:
                for stream in streams:
                    service.engine.cancel(stream.request_id)
                raise
            return streams

        asked = len(self.body.prompts) if isinstance(self.body, CompletionBody) else 1
        count = self.body.choices_per_prompt * asked
        if hints.steps:
            tenant.allowed_hints.require()
        service.admit(tenant, count, "prompt" if asked > 1 else "n")
        tenant.allowed_hints.use(len(hints.steps or ()))
        run = self.run = service.client_runs.touch(tenant.namespace(hints.salt), hints, self.registered)
        if run and agent:
            self.step = run.call(agent, fills=fills)
        elif fills:
            self.step = Step(agent, 0)
        try:
            operation = "chat" if isinstance(self.body, ChatBody) else "text_completion"
            self._span = service.tracing.generation(operation, tenant.id) if service.tracing else None
            may_wait = bool(self.sampling.grammar)  # for others of its tenant to be read
            streams = await (asyncio.wrap_future(threads.wait(submit)) if may_wait else threads.work(submit))
        except BaseException as error:  # cancellation too must undo it
            tenant.give_back(count)
            if self._span:
                self._span.failed(error)
            if run and agent:
                run.end_call(agent, self.step)
            self._name_field(error)
            raise
        self.completions, self._ids = [None] * len(streams), [stream.request_id for stream in streams]
        self._following = len(streams)
        service.calls[self] = self.arrive
        for at, stream in enumerate(streams):
            threads.follow(stream, partial(self._take, at))
        if run and self.step and self.registered:
            run.read(self.registered, self.step, self.requests[0], hints.reuse)
        if run and agent:
            service.client_runs.moved(run, agent, has_ended=False)

    # what comes of it -------------------------------------------------------------------------------------------------

    def _take(self, at: int, item: Item) -> None:
        """Book what has come of generation number `at`, and pass it on to the reader."""
        has_ended = isinstance(item, BaseException) or item.completion is not None
        if has_ended:  # before the client hears of it: if it calls again at once, the room is free
            self.caller.tenant.give_back()
        if isinstance(item, TokenDelta) and item.completion:
            self.completions[at] = item.completion
            if item.completion.finish_reason is FinishReason.CANCELLED:
                item = EngineClosed("choice", at, "its generation was cancelled")
        self.arrive(item if isinstance(item, BaseException) else (at, item))
        if has_ended:
            self._following -= 1
            if not self._following:  # the whole call is over
                del self.caller.service.calls[self]
                if self._span:
                    self._span.ended([one for one in self.completions if one])
                self._leave()

    def _leave(self) -> None:
        """Tell the call's run, once, what came of it: without a whole answer it was not made, and may be made again."""
        run, self.run, hints, answer = self.run, None, self.hints, self.completions[0]
        if run and (answer is None or answer.finish_reason is FinishReason.CANCELLED):
            run.end_call(hints.agent, self.step)
        elif run and answer:
            self.caller.service.client_runs.answered(run, hints, self.step, answer)

    async def batches(self) -> AsyncIterator[list[tuple[int, TokenDelta]]]:
        """Yield the deltas that have arrived since the last batch, each with the number of its generation.

        Raises the first error of any generation, and `EngineClosed` if the engine cancelled one.
        """
        while None in self.completions or not self._arrived.empty():
            arrived = [await self._arrived.get()]
            while not self._arrived.empty():
                arrived.append(self._arrived.get_nowait())
            error = next((one for one in arrived if isinstance(one, BaseException)), None)
            before = arrived if error is None else arrived[: arrived.index(error)]
            deltas = [one for one in before if not isinstance(one, BaseException)]
            if deltas:
                yield deltas
            if error is not None:
                self._name_field(error)
                raise error

    async def is_awaited(self) -> bool:
        """Wait for all completions; False if the client disconnects first. The call is over then. Raises like
        `batches`.
        """

        async def read() -> None:
            async for _ in self.batches():
                pass

        async def is_gone() -> None:
            while (await self.caller.request.receive())["type"] != "http.disconnect":
                pass

        reading, gone = asyncio.ensure_future(read()), asyncio.ensure_future(is_gone())
        try:
            await asyncio.wait({reading, gone}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
            return reading.done()
        finally:
            self.end()
            reading.cancel()
            gone.cancel()

    def end(self) -> None:
        """Stop reading: cancel the generations that still run."""
        self._leave()  # before its client can call again
        left = [name for name, done in zip(self._ids, self.completions, strict=True) if done is None]
        self.caller.service.threads.cancel(left)

    def reader(self) -> AnswerReader:
        """Return the reader of a choice."""
        form, body = self.caller.service.settings.tool_call_parser, self.body
        if form and isinstance(body, ChatBody) and body.tools_to_use:
            return PARSERS[form](1 if body.has_one_call else None)
        return AnswerReader()

    def kedge(self) -> dict[str, Any]:
        """Return the answer's field `kedge`: a receipt per choice, the hints, what became of each of the client's
        actions, and what of the body was left out.
        """
        hints, ignored = self.hints, [str(brief(one)) for one in dict.fromkeys(self.body.left_out)][:MAX_EXPECTED]
        field: dict[str, Any] = {"receipts": [receipt(one) for one in self.completions if one]}
        field["hints"] = hints.to_dict()
        if hints.actions:
            field["actions"] = [one.to_dict() for one in hints.actions]
        return {**field, "ignored": ignored} if ignored else field

    # its requests, built off the event loop ---------------------------------------------------------------------------

    def _name_field(self, error: BaseException) -> None:
        """Name the chat's field in an engine's error about the prompt or the grammar."""
        if isinstance(error, InvalidGrammar):
            has_content = "\ncontent: " in self.sampling.grammar  # the rule of the text, if that is not free
            error.rename("response_format" if has_content else "tools", error.value)
        elif isinstance(error, EmptyPrompt | InvalidToken | PromptTooLong):
            field = "kedge.bindings" if self.step else self.body.prompt_field
            value = {EmptyPrompt: "", PromptTooLong: f"{error.value} tokens"}.get(type(error), error.value)
            if error.key not in ("kedge.bindings", field):
                error.rename(field, value)

    def _requests(self) -> list[GenerateRequest]:
        """Return the requests of every prompt, one for each choice."""
        hints, seed, agent, registered = self.hints, self.sampling.seed, self.agent, self.registered
        tokenizer, fixed = self.caller.service.engine.tokenizer, hints.fixed_tokens
        if self.step and registered:
            template = registered.prompts[self.step.agent]
            values = values_for(template, hints.bindings or {}, tokenizer, registered, self.run, self.step)
            # all calls of this agent share the beginning of its template
            asked, fixed = [template.fill(values)], len(template.prefixes[0]) or None
        elif isinstance(self.body, CompletionBody):
            asked = [prompts.of_prompt(tokenizer, one) for one in self.body.prompts]
        else:
            asked = [prompts.of_chat(tokenizer, self.body)]
        guard = GuardOrders(hints.guard, fidelity=hints.fidelity, pick=hints.pick)
        if agent is not None:
            fidelity = agent.fidelity if hints.fidelity is None else hints.fidelity
            guard = GuardOrders(hints.guard or agent.guard, fidelity=fidelity, pick=hints.pick or agent.pick)
        produces = None
        if self.run and self.step and registered:  # a sample if an agent of the workflow reads the answer in this run
            reads = (read for one in registered.workflow.agents for read in one.placeholders)
            is_read = any(read.kind is ValueKind.AGENT and read.of == self.step.agent for read in reads)
            produces = self.step.sample() if is_read else None
        tools = self.caller.service.settings.tool_call_parser
        requests = []
        for segments in asked:
            if hints.fixed_messages and not self.step:
                fixed = prompts.tokens_up_to(segments, f"message_{hints.fixed_messages - 1}")
            for choice in range(self.body.choices_per_prompt):
                request = GenerateRequest(
                    segments=tuple(segments),
                    sampling=replace(self.sampling, seed=None if seed is None else (seed + choice) % 2**63),
                    reuse=self.mode,
                    guard=guard,
                    request_id=RequestId(f"http-{uuid.uuid4().hex}"),
                    tenant=self.caller.tenant.id,
                    partition=self.caller.tenant.namespace(hints.salt).partition,
                    client=ClientId(hints.client),
                    workflow=hints.workflow,
                    run=hints.run,
                    agent=hints.agent,
                    produces=produces if choice == 0 else None,
                    fixed=fixed,
                    is_plain=self.step is None and hints.reuse is None,
                    turn=hints.turn,
                    tool_mark=PARSERS[tools].mark if tools else "",
                    logprobs=self.body.top_logprobs_count,
                    prompt_logprobs=self.body.prompt_logprobs_count,
                )
                requests.append(request)
        return requests


router = APIRouter(tags=["OpenAI"], responses=ERRORS, route_class=TypedRoute)


@router.post("/v1/chat/completions", responses=STREAMED)
async def chat_completions(body: ChatBody, caller: TheCaller) -> Response:
    """Answer a conversation or, with `kedge.bindings`, as a registered workflow's agent."""
    return await answer(body, CompletionsWriter(caller.service), caller)


@router.post("/v1/completions", responses=STREAMED)
async def completions(body: CompletionBody, caller: TheCaller) -> Response:
    """Continue texts or token ids."""
    return await answer(body, CompletionsWriter(caller.service), caller)


@router.get("/v1/models")
async def models(caller: TheCaller) -> Response:
    """List the one model that is served."""
    return JSONAnswer({"object": "list", "data": [_model(caller.service)]})


@router.get("/v1/models/{name:path}")
async def model(name: str, caller: TheCaller) -> Response:
    """Return a model by its name."""
    caller.service.check_model(name)
    return JSONAnswer(_model(caller.service))


def _model(service: Service) -> dict[str, object]:
    return {"id": service.model_name, "object": "model", "created": service.started, "owned_by": "kedge"}
