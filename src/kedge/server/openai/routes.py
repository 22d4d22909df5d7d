"""OpenAI's routes: chat completions, text completions and models."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial

from fastapi import APIRouter, Request, Response

from kedge.errors import KedgeError
from kedge.server.http import (
    BODY_ERRORS,
    DONE,
    ERRORS,
    EVENTS,
    JSON,
    EventStream,
    JSONAnswer,
    TypedRoute,
    answers,
    error_body,
    event,
    failure_of,
    kedge_field,
    problem_of,
    usage,
)
from kedge.server.logs import CLIENT_GONE
from kedge.server.openai.generation import CallContext, GenerationJob, completion_job
from kedge.server.openai.protocol import ChatBody, CompletionBody
from kedge.server.openai.responses import ChatFormat, Choice, ChunkEncoder, CompletionFormat, Format
from kedge.server.openai.single import chat_call, read_call, reader_of, unless_gone
from kedge.server.service import GenerationCall, Service, TheService, TheTenant
from kedge.server.workflows.server_runs import TheWorkflows
from kedge.types import Completion, TokenDelta

router = APIRouter(tags=["OpenAI"], responses=ERRORS, route_class=TypedRoute)
ANSWERS = answers(200, kinds=(*JSON, *EVENTS)) | BODY_ERRORS


@router.post("/v1/chat/completions", response_model=None, responses=ANSWERS)
async def chat_completions(
    body: ChatBody, request: Request, service: TheService, workflows: TheWorkflows, tenant: TheTenant
) -> Response:
    """Answer a conversation or, with `kedge.bindings`, as a registered workflow's agent."""
    job = await chat_call(body, request, service, workflows, tenant)
    form = ChatFormat(service.model_name, service.engine.tokenizer, reader=partial(reader_of, service, body))
    return await _answer(job, form, request)


@router.post("/v1/completions", response_model=None, responses=ANSWERS)
async def completions(
    body: CompletionBody, request: Request, service: TheService, workflows: TheWorkflows, tenant: TheTenant
) -> Response:
    """Continue texts or token ids."""
    hints = await service.threads.work(partial(read_call, body, request, service, tenant))
    job = completion_job(CallContext(service, workflows, tenant, hints), body)
    form = CompletionFormat(service.model_name, service.engine.tokenizer, echo=bool(body.echo))
    return await _answer(job, form, request)


@router.get("/v1/models", response_model=None)
async def models(service: TheService, tenant: TheTenant) -> Response:  # noqa: ARG001 (authenticates the caller)
    """List the one model that is served."""
    return JSONAnswer({"object": "list", "data": [_model(service)]})


@router.get("/v1/models/{name:path}", response_model=None)
async def model(name: str, service: TheService, tenant: TheTenant) -> Response:  # noqa: ARG001
    """Return a model by its name."""
    service.check_model(name)
    return JSONAnswer(_model(service))


def _model(service: Service) -> dict[str, object]:
    return {"id": service.model_name, "object": "model", "created": service.started, "owned_by": "kedge"}


async def _answer(job: GenerationJob, form: Format, request: Request) -> Response:
    call = await job.begin()
    if job.body.stream:
        return EventStream(_chunks(job, call, form, request), call.end)
    finished = await unless_gone(job, call, request)
    if finished is None:
        return Response(status_code=CLIENT_GONE)
    write = partial(_whole, job, form, call, finished)
    has_logprobs = job.body.top_logprobs_count is not None
    return JSONAnswer(await job.context.service.threads.work(write) if has_logprobs else write())


def _whole(job: GenerationJob, form: Format, call: GenerationCall, finished: list[Completion]) -> dict[str, object]:
    asked = enumerate(zip(call.requests, finished, strict=True))
    choices = [form.writer(at, request).whole(completion) for at, (request, completion) in asked]
    counts = usage(finished, job.body.choices_per_prompt)
    return form.whole(choices, usage=counts, kedge=kedge_field(job.hints, finished))


async def _chunks(job: GenerationJob, call: GenerationCall, form: Format, request: Request) -> AsyncIterator[bytes]:
    """Yield a stream's events: the choices' chunks, the usage if it is asked for, and the end mark."""
    service, wants_usage = job.context.service, bool(job.body.stream_options and job.body.stream_options.include_usage)
    before_usage: dict[str, None] = {"usage": None} if wants_usage else {}
    encoder = ChunkEncoder(form, **before_usage)
    writers, left = [form.writer(at, one) for at, one in enumerate(call.requests)], job.count

    def written(batch: list[tuple[int, TokenDelta]]) -> list[Choice]:
        return [choice for at, delta in batch for choice in writers[at].chunks(delta)]

    try:
        async for batch in call.batches():
            write = partial(written, batch)
            is_long = any(delta.prompt_logprobs for _, delta in batch)  # those of a prompt are not for the event loop
            choices = await service.threads.work(write) if is_long else write()
            left -= sum(delta.completion is not None for _, delta in batch)
            if not left:
                finished = [completion for completion in call.completions if completion]
                chunks = [form.chunk(choice, **before_usage) for choice in choices]
                if wants_usage:
                    chunks.append(form.chunk(usage=usage(finished, job.body.choices_per_prompt)))
                chunks[-1]["kedge"] = kedge_field(job.hints, finished)
                yield b"".join(map(event, chunks))
            elif choices:
                yield b"".join(map(encoder.event, choices))
    except KedgeError as error:
        body = error_body(error)
        service.failed(job.context.tenant.id, failure_of(request, body, problem_of(error).status))
        yield event(body)
    yield DONE
