"""OpenAI's routes: chat and text completions, models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

from fastapi import APIRouter, Request, Response

from kedge.errors import KedgeError
from kedge.server.calls import Call
from kedge.server.errors import BODY_ERRORS, ERRORS, EVENTS, JSON, answers, problem_of, told
from kedge.server.media_types import TypedRoute
from kedge.server.openai import protocol
from kedge.server.openai.chunks import ChunkEncoder
from kedge.server.openai.generation import Job, chat_job, completion_job
from kedge.server.openai.protocol import ChatBody, CompletionBody, GenerationBody
from kedge.server.openai.responses import ChatFormat, Choice, CompletionFormat, Format, Writer
from kedge.server.openai.tool_calls import PlainText
from kedge.server.service import Service, TheService, TheTenant
from kedge.server.sse import DONE, EventStream, JSONAnswer, event
from kedge.types import Completion, TokenDelta

router = APIRouter(tags=["OpenAI"], responses=ERRORS, route_class=TypedRoute)
ANSWERS = answers(200, kinds=(*JSON, *EVENTS)) | BODY_ERRORS
CLIENT_GONE = 499
"""The status of an answer that nobody reads; nginx's word for it."""


@router.post("/v1/chat/completions", response_model=None, responses=ANSWERS)
async def chat_completions(body: ChatBody, request: Request, service: TheService, tenant: TheTenant) -> Response:
    """Answers a conversation or, with `kedge.bindings`, as a registered workflow's agent."""
    hints = service.checked_hints(tenant, body, request.headers)
    job = chat_job(service, tenant, body, hints)
    form = ChatFormat(
        service.config.model_name,
        service.engine.tokenizer,
        parser=service.config.parser if body.tools_to_use else PlainText,
        most_calls=1 if body.parallel_tool_calls is False else None,
    )
    return await _answer(job, form, request)


@router.post("/v1/completions", response_model=None, responses=ANSWERS)
async def completions(body: CompletionBody, request: Request, service: TheService, tenant: TheTenant) -> Response:
    """Continues texts or token ids."""
    hints = service.checked_hints(tenant, body, request.headers)
    job = completion_job(service, tenant, body, hints)
    form = CompletionFormat(service.config.model_name, service.engine.tokenizer, echo=bool(body.echo))
    return await _answer(job, form, request)


@router.get("/v1/models", response_model=None)
async def models(service: TheService, tenant: TheTenant) -> Response:  # noqa: ARG001 (who asks must be known)
    """The one model that is served."""
    return JSONAnswer({"object": "list", "data": [_model(service)]})


@router.get("/v1/models/{name:path}", response_model=None)
async def model(name: str, service: TheService, tenant: TheTenant) -> Response:  # noqa: ARG001
    """A model by its name."""
    service.check_model(name)
    return JSONAnswer(_model(service))


def _model(service: Service) -> dict[str, object]:
    return {"id": service.config.model_name, "object": "model", "created": service.started, "owned_by": "kedge"}


async def _answer(job: Job, form: Format, request: Request) -> Response:
    call = await job.begin()
    if job.body.stream:
        return EventStream(_chunks(job, call, form), call.end)
    try:
        finished = await _unless_gone(call, request)
    finally:
        call.end()
    if finished is None:
        return Response(status_code=CLIENT_GONE)
    write = partial(_whole, job, form, call, finished)
    return JSONAnswer(write() if job.body.likeliest is None else await job.service.threads.work(write))


async def _unless_gone(call: Call, request: Request) -> list[Completion] | None:
    """The call's completions; None where the client has gone before."""
    finished = asyncio.ensure_future(call.finished())
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({finished, gone}, return_when=asyncio.FIRST_COMPLETED)
        return finished.result() if finished.done() else None
    finally:
        finished.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _whole(job: Job, form: Format, call: Call, finished: list[Completion]) -> dict[str, object]:
    writers = _writers(form, call)
    choices = [writer.whole(completion) for writer, completion in zip(writers, finished, strict=True)]
    usage = protocol.usage(finished, job.body.choices_per_prompt)
    return form.whole(choices, usage=usage, kedge=protocol.kedge_field(job.hints, finished))


def _writers(form: Format, call: Call) -> list[Writer]:
    return [form.writer(at, request) for at, request in enumerate(call.requests)]


async def _chunks(job: Job, call: Call, form: Format) -> AsyncIterator[bytes]:
    """A stream's events: what the choices say, usage if it is asked for, and the mark of the end."""
    encoder = ChunkEncoder(form, **_usage_field(job.body))
    writers, left = _writers(form, call), job.count
    try:
        async for batch in call.batches():
            choices = await _choices(job, writers, batch)
            left -= sum(delta.completion is not None for _, delta in batch)
            if not left:
                yield b"".join(map(event, _sealed(choices, job, call, form)))
            elif choices:
                yield b"".join(map(encoder.event, choices))
    except KedgeError as error:
        job.service.metrics.failed(job.tenant.id, problem_of(error).status)
        yield event(told(error))
    yield DONE


async def _choices(job: Job, writers: list[Writer], batch: list[tuple[int, TokenDelta]]) -> list[Choice]:
    """Return what is to be sent of a few deltas. Log-probabilities of a whole prompt are written off the event loop."""

    def write() -> list[Choice]:
        return [choice for at, delta in batch for choice in writers[at].chunks(delta)]

    is_long = any(delta.prompt_logprobs for _, delta in batch)
    return await job.service.threads.work(write) if is_long else write()


def _sealed(choices: list[Choice], job: Job, call: Call, form: Format) -> list[dict[str, object]]:
    """Return a stream's last chunks, the very last with the receipts, and with the usage if it is asked for."""
    finished = [completion for completion in call.completions if completion]
    said = [form.chunk(choice, **_usage_field(job.body)) for choice in choices]
    if _wants_usage(job.body):
        said.append(form.chunk(usage=protocol.usage(finished, job.body.choices_per_prompt)))
    said[-1]["kedge"] = protocol.kedge_field(job.hints, finished)
    return said


def _usage_field(body: GenerationBody) -> dict[str, None]:
    """Return what chunks say of the usage before the last one: nothing yet."""
    return {"usage": None} if _wants_usage(body) else {}


def _wants_usage(body: GenerationBody) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)
