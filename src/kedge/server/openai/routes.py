"""OpenAI's routes: chat completions, text completions and models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from functools import partial

from fastapi import APIRouter, Request, Response

from kedge.errors import KedgeError
from kedge.hints import Hints
from kedge.server.calls import GenerationCall, kedge_field, usage
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
    problem_of,
)
from kedge.server.openai.generation import CallContext, GenerationJob, chat_job, completion_job
from kedge.server.openai.protocol import ChatBody, CompletionBody, GenerationBody
from kedge.server.openai.responses import ChatFormat, Choice, ChunkEncoder, CompletionFormat, Format, Writer
from kedge.server.openai.single import CLIENT_GONE, unless_gone
from kedge.server.openai.tool_calls import parser_of
from kedge.server.service import Service, TheService, TheTenant
from kedge.server.tenancy import Tenant
from kedge.server.workflows.server_runs import TheWorkflows
from kedge.types import Completion, TokenDelta

router = APIRouter(tags=["OpenAI"], responses=ERRORS, route_class=TypedRoute)
ANSWERS = answers(200, kinds=(*JSON, *EVENTS)) | BODY_ERRORS


@router.post("/v1/chat/completions", response_model=None, responses=ANSWERS)
async def chat_completions(
    body: ChatBody, request: Request, service: TheService, workflows: TheWorkflows, tenant: TheTenant
) -> Response:
    """Answer a conversation or, with `kedge.bindings`, as a registered workflow's agent."""
    hints = request.state.hints = _checked_hints(service, tenant, body, request.headers)
    job = chat_job(CallContext(service, workflows, tenant, hints), body)
    form = ChatFormat(
        service.model_name,
        service.engine.tokenizer,
        parser=parser_of(service.settings.tool_call_parser if body.tools_to_use else None),
        max_calls=1 if body.parallel_tool_calls is False else None,
    )
    return await _answer(job, form, request)


@router.post("/v1/completions", response_model=None, responses=ANSWERS)
async def completions(
    body: CompletionBody, request: Request, service: TheService, workflows: TheWorkflows, tenant: TheTenant
) -> Response:
    """Continue texts or token ids."""
    hints = request.state.hints = _checked_hints(service, tenant, body, request.headers)
    job = completion_job(CallContext(service, workflows, tenant, hints), body)
    form = CompletionFormat(service.model_name, service.engine.tokenizer, echo=bool(body.echo))
    return await _answer(job, form, request)


def _checked_hints(service: Service, tenant: Tenant, body: GenerationBody, headers: Mapping[str, str]) -> Hints:
    """Return the hints of a body. Raises `NotFound` for another model, `RequestError` for unsupported parameters."""
    service.check_model(body.model)
    body.refuse_unsupported()
    return service.hints(tenant, body.hints, headers)


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
    try:
        finished = await unless_gone(call, request)
    finally:
        call.end()
    if finished is None:
        return Response(status_code=CLIENT_GONE)
    write = partial(_whole, job, form, call, finished)
    has_logprobs = job.body.top_logprobs_count is not None
    return JSONAnswer(await job.context.service.threads.work(write) if has_logprobs else write())


def _whole(job: GenerationJob, form: Format, call: GenerationCall, finished: list[Completion]) -> dict[str, object]:
    writers = _writers(form, call)
    choices = [writer.whole(completion) for writer, completion in zip(writers, finished, strict=True)]
    counts = usage(finished, job.body.choices_per_prompt)
    return form.whole(choices, usage=counts, kedge=kedge_field(job.context.hints, finished))


def _writers(form: Format, call: GenerationCall) -> list[Writer]:
    return [form.writer(at, request) for at, request in enumerate(call.requests)]


async def _chunks(job: GenerationJob, call: GenerationCall, form: Format, request: Request) -> AsyncIterator[bytes]:
    """Yield a stream's events: the choices' chunks, the usage if it is asked for, and the end mark."""
    encoder = ChunkEncoder(form, **_usage_field(job.body))
    writers, left = _writers(form, call), job.count
    try:
        async for batch in call.batches():
            choices = await _choices(job, writers, batch)
            left -= sum(delta.completion is not None for _, delta in batch)
            if not left:
                yield b"".join(map(event, _last_chunks(choices, job, call, form)))
            elif choices:
                yield b"".join(map(encoder.event, choices))
    except KedgeError as error:
        body = error_body(error)
        job.context.service.failed(job.context.tenant.id, failure_of(request, body, problem_of(error).status))
        yield event(body)
    yield DONE


async def _choices(job: GenerationJob, writers: list[Writer], batch: list[tuple[int, TokenDelta]]) -> list[Choice]:
    """Return the chunks' choices of a few deltas. Logprobs of a whole prompt are written off the event loop."""

    def write() -> list[Choice]:
        return [choice for at, delta in batch for choice in writers[at].chunks(delta)]

    is_long = any(delta.prompt_logprobs for _, delta in batch)
    return await job.context.service.threads.work(write) if is_long else write()


def _last_chunks(
    choices: list[Choice], job: GenerationJob, call: GenerationCall, form: Format
) -> list[dict[str, object]]:
    """Return a stream's last chunks, the very last with the receipts, and with the usage if it is asked for."""
    finished = [completion for completion in call.completions if completion]
    chunks = [form.chunk(choice, **_usage_field(job.body)) for choice in choices]
    if _wants_usage(job.body):
        chunks.append(form.chunk(usage=usage(finished, job.body.choices_per_prompt)))
    chunks[-1]["kedge"] = kedge_field(job.context.hints, finished)
    return chunks


def _usage_field(body: GenerationBody) -> dict[str, None]:
    """Return the usage field of chunks before the last one: null if usage is asked for, else none."""
    return {"usage": None} if _wants_usage(body) else {}


def _wants_usage(body: GenerationBody) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)
