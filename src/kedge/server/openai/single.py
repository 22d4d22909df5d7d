"""Answers of protocols whose calls have one choice: the same generation as a chat's, written in events of their own."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from fastapi import Request, Response

from kedge.checks import brief
from kedge.engine.base import Tokenizer
from kedge.errors import InvalidGrammar, KedgeError, RequestError
from kedge.hints import Hints
from kedge.server.http import (
    EventStream,
    JSONAnswer,
    StreamEvent,
    error_body,
    event,
    failure_of,
    kedge_field,
    problem_of,
)
from kedge.server.logs import CLIENT_GONE
from kedge.server.openai.generation import CallContext, GenerationJob, chat_job
from kedge.server.openai.protocol import ChatBody, GenerationBody
from kedge.server.openai.tool_calls import AnswerReader, ParsedText, grammar_of, unkept
from kedge.server.service import GenerationCall, Service
from kedge.server.tenancy import Tenant
from kedge.server.workflows.server_runs import Workflows
from kedge.types import Completion, FinishReason, GenerateRequest


class AnswerWriter(ABC):
    """Writer of one answer, whole or as a stream's events."""

    stopped_by: str | None = None
    """The stop string that ended the answer; known when it has ended"""

    @abstractmethod
    def whole(self, parsed: ParsedText, completion: Completion) -> dict[str, Any]:
        """Return a whole answer."""

    @abstractmethod
    def begin(self, request: GenerateRequest) -> Iterable[StreamEvent]:
        """Yield the events before the first token."""

    @abstractmethod
    def add(self, parsed: ParsedText) -> Iterable[StreamEvent]:
        """Yield the events of a piece of the answer."""

    @abstractmethod
    def end(self, completion: Completion, kedge: Mapping[str, Any]) -> Iterable[StreamEvent]:
        """Yield the events after the last token."""

    @abstractmethod
    def failed(self, error: Mapping[str, Any]) -> Iterable[StreamEvent]:
        """Yield the events of an error that ends a stream; `error` is as in OpenAI's answers."""


def unkept_of(body: GenerationBody) -> Iterable[str]:
    """Yield what of a body's schemas the answer may not conform to."""
    if isinstance(body, ChatBody) and body.response_format and body.response_format.json_schema:
        yield from (f"response_format.{name}" for name in unkept(body.response_format.json_schema.get("schema")))
    if isinstance(body, ChatBody) and (body.must_call or body.response_format):
        schemas = (tool.function.parameters for tool in body.tools_to_use if tool.function)
        yield from (f"tools.{name}" for schema in schemas for name in unkept(schema))


def stop_of(tokenizer: Tokenizer, request: GenerateRequest, completion: Completion) -> str | None:
    """Return the stop string that ended an answer; None where something else has."""
    stops = request.sampling.stop if completion.finish_reason is FinishReason.STOP else ()
    said = tokenizer.decode(completion.tokens) if stops else ""
    return next((stop for stop in stops if said.startswith(completion.text + stop)), None)


def reader_of(service: Service, body: ChatBody) -> AnswerReader:
    """Return the reader of an answer to a chat."""
    tools = service.settings.tool_call_parser if body.tools_to_use else None
    return AnswerReader(tools, 1 if body.parallel_tool_calls is False else None)


async def chat_call(
    body: ChatBody, request: Request, service: Service, workflows: Workflows, tenant: Tenant
) -> GenerationJob:
    """Return the job of a call that is a chat. Raises as `read_call` and `chat_job` do."""

    def read() -> tuple[Hints, str]:
        hints = read_call(body, request, service, tenant)
        return hints, grammar_of(body, service.settings.tool_call_parser)

    hints, grammar = await service.threads.work(read)
    return chat_job(CallContext(service, workflows, tenant, hints), body, grammar)


def read_call(body: GenerationBody, request: Request, service: Service, tenant: Tenant) -> Hints:
    """Return the hints of a call, with what of it is left out.

    Raises `NotFound` for another model, and `RequestError` for parameters that are not supported.
    """
    service.check_model(body.model)
    body.refuse_unsupported()
    hints = service.hints(tenant, body.hints, request.headers)
    ignored = dict.fromkeys((*hints.ignored, *body.left_out, *unkept_of(body)))
    request.state.hints = replace(hints, ignored=tuple(str(brief(one)) for one in islice(ignored, 64)))
    return request.state.hints


async def answer(
    body: ChatBody, writer: AnswerWriter, request: Request, service: Service, workflows: Workflows, tenant: Tenant
) -> Response:
    """Answer a call that was read as a chat. Raises as chat completions do."""
    if body.choices_per_prompt > 1:
        raise RequestError("n", body.n, "this protocol's answers have one choice")
    job = await chat_call(body, request, service, workflows, tenant)
    reader = reader_of(service, body)
    call = await job.begin()
    if body.stream:
        return EventStream(_events(job, call, reader, writer, request), call.end)
    finished = await unless_gone(job, call, request)
    if finished is None:
        return Response(status_code=CLIENT_GONE)
    (completion,) = finished
    writer.stopped_by = stop_of(service.engine.tokenizer, call.requests[0], completion)
    whole = writer.whole(reader.push(completion), completion)
    return JSONAnswer({**whole, "kedge": kedge_field(job.hints, finished)})


async def _events(
    job: GenerationJob, call: GenerationCall, reader: AnswerReader, writer: AnswerWriter, request: Request
) -> AsyncIterator[bytes]:
    yield _bytes(writer.begin(call.requests[0]))
    try:
        async for batch in call.batches():
            for _, delta in batch:
                yield _bytes(writer.add(reader.push(delta)))
                if delta.completion:
                    tokenizer = job.context.service.engine.tokenizer
                    writer.stopped_by = stop_of(tokenizer, call.requests[0], delta.completion)
                    yield _bytes(writer.end(delta.completion, kedge_field(job.hints, [delta.completion])))
    except KedgeError as error:
        yield failure(writer, error, request, job.context.service, job.context.tenant)


def failure(writer: AnswerWriter, error: KedgeError, request: Request, service: Service, tenant: Tenant) -> bytes:
    """Return the end of a stream of which a call has failed, and count the call."""
    body = error_body(error)
    service.failed(tenant.id, failure_of(request, body, problem_of(error).status))
    return _bytes(writer.failed(body["error"]))


def _bytes(events: Iterable[StreamEvent]) -> bytes:
    return b"".join(event(one.data, name=one.name) for one in events)


async def unless_gone(job: GenerationJob, call: GenerationCall, request: Request) -> list[Completion] | None:
    """Return the completions of a job's call, or None if the client disconnects first. The call is over then."""

    async def is_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    finished, gone = asyncio.ensure_future(call.finished()), asyncio.ensure_future(is_gone())
    try:
        await asyncio.wait({finished, gone}, return_when=asyncio.FIRST_COMPLETED)
        return finished.result() if finished.done() else None
    except InvalidGrammar as error:
        job.name_field(error)
        raise
    finally:
        call.end()
        finished.cancel()
        gone.cancel()
