"""OpenAI's routes: chat and text completions, models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request, Response

from kedge.errors import KedgeError
from kedge.server import protocol
from kedge.server.calls import Call
from kedge.server.formats import ChatFormat, CompletionFormat, Format
from kedge.server.generation import Job, chat_job, completion_job
from kedge.server.problems import problem_of, told
from kedge.server.protocol import ChatBody, CompletionBody, GenerationBody
from kedge.server.service import Service, TheService, TheTenant
from kedge.server.wire import DONE, EventStream, JSONAnswer, event
from kedge.types import Completion

router = APIRouter(tags=["OpenAI"])
CLIENT_GONE = 499
"""The status of an answer that nobody reads; nginx's word for it."""


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(body: ChatBody, request: Request, service: TheService, tenant: TheTenant) -> Response:
    """Answers a conversation or, with `kedge.bindings`, as a registered workflow's agent."""
    hints = service.checked_hints(tenant, body, request.headers)
    job = chat_job(service, tenant, body, hints)
    return await _answer(job, ChatFormat(service.config.model_name), request)


@router.post("/v1/completions", response_model=None)
async def completions(body: CompletionBody, request: Request, service: TheService, tenant: TheTenant) -> Response:
    """Continues texts or token ids."""
    hints = service.checked_hints(tenant, body, request.headers)
    job = completion_job(service, tenant, body, hints)
    return await _answer(job, CompletionFormat(service.config.model_name), request)


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
    return Response(status_code=CLIENT_GONE) if finished is None else JSONAnswer(_whole(job, form, finished))


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


def _whole(job: Job, form: Format, finished: list[Completion]) -> dict[str, object]:
    usage = protocol.usage(finished, job.body.choices_per_prompt)
    return form.whole(finished, usage=usage, kedge=protocol.kedge_field(job.hints, finished))


async def _chunks(job: Job, call: Call, form: Format) -> AsyncIterator[bytes]:
    """A stream's events: openings, texts, endings, usage if it is asked for, and the mark of the end."""
    usage = {"usage": None} if _wants_usage(job.body) else {}
    open_choices: set[int] = set()
    done: list[Completion | None] = [None] * job.count
    try:
        async for at, delta in call.deltas():
            said = b""
            if at not in open_choices and (opening := form.opening(at)):
                said = event(form.chunk(opening, **usage))
            open_choices.add(at)
            if delta.text:
                said += event(form.chunk(form.delta(at, delta.text), **usage))
            if delta.completion:
                done[at] = delta.completion
                said += _ending(job, form, at, delta.completion, done)
            if said:
                yield said
    except KedgeError as error:
        job.service.metrics.failed(job.tenant.id, problem_of(error).status)
        yield event(told(error))
    yield DONE


def _ending(job: Job, form: Format, at: int, completion: Completion, done: list[Completion | None]) -> bytes:
    """A choice's last chunk. The stream's very last one has the receipts, and the usage if it is asked for."""
    finished = [one for one in done if one is not None]
    is_last = len(finished) == len(done)
    last = {"kedge": protocol.kedge_field(job.hints, finished)} if is_last else {}
    ending = form.delta(at, "", completion.finish_reason)
    if not _wants_usage(job.body):
        return event(form.chunk(ending, **last))
    said = event(form.chunk(ending, usage=None))
    if is_last:
        said += event(form.chunk(usage=protocol.usage(finished, job.body.choices_per_prompt), **last))
    return said


def _wants_usage(body: GenerationBody) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)
