"""Bodies, answers and errors of HTTP calls, without engines.

Errors are answered in the format of OpenAI's API: `{"error": {"message", "type", "param", "code"}}` and a status.
"""

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Self, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, WrapValidator
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import DictSchema, ListSchema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kedge.checks import brief
from kedge.errors import (
    EngineClosed,
    KedgeError,
    LimitReached,
    NotFound,
    OutOfBlocks,
    Overloaded,
    PromptTooLong,
    RequestError,
    Unauthenticated,
    WorkflowError,
)
from kedge.server.logs import CLIENT_GONE
from kedge.server.tenancy import Tenant
from kedge.types import Completion, Source

OVERLOADED = "overloaded"
JSON, EVENTS = "application/json", "text/event-stream"
DONE = b"data: [DONE]\n\n"
_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def dumps(data: object) -> bytes:
    """Return JSON in UTF-8. A lone surrogate, which UTF-8 cannot encode, becomes a question mark, and a number that
    JSON cannot write null: clients may have sent it.
    """
    try:
        text = _encoder.encode(data)
    except ValueError:
        text = _encoder.encode(json.loads(json.dumps(data), parse_constant=lambda _: None))
    return text.encode("utf-8", "replace")


def event(data: object, *, name: str = "", number: int | None = None) -> bytes:
    """Return a server-sent event with JSON data, which contains no line breaks."""
    head = (f"event: {name}\n" if name else "") + (f"id: {number}\n" if number is not None else "")
    return head.encode() + b"data: " + dumps(data) + b"\n\n"


class JSONAnswer(Response):
    """Answer with a JSON body, see `dumps`."""

    media_type = JSON

    def render(self, content: Any) -> bytes:
        return dumps(content)


class EventStream(StreamingResponse):
    """Answer of server-sent events. `on_end` is called exactly once, even if the stream never began."""

    media_type = EVENTS

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


YAML = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")
"""RFC 9512, and older names."""


class TypedRoute(APIRoute):
    """Route that reads the bodies of callers who are known, see `read_body`, long ones off the event loop. It answers
    415 to a body in a media type that it does not declare, or without a type.

    This keeps out web pages of other sites: a browser lets them send forms and plain text freely, but makes a preflight
    request before JSON or YAML, which this server does not grant.
    """

    def get_route_handler(self, long_body: int = 1 << 16) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        body = (self.openapi_extra or {}).get("requestBody", {})
        declared = tuple(body.get("content", ())) or ((JSON,) if self.body_field else ())
        handle = super().get_route_handler()

        async def handle_read(request: Request) -> Response:
            service = request.app.state.service
            tenant = service.authenticate(request)
            if request.method == "GET":
                return await handle(request)
            try:
                await read_body(request, body := bytearray(), tenant)
                content = request._body = bytes(body)
                if declared:
                    require_type(request, declared)
                if self.body_field and len(content) > long_body:
                    request._json = await service.threads.work(partial(_checked, self.body_field, content))
            except ClientDisconnect:
                return Response(status_code=CLIENT_GONE)
            finally:
                tenant.body_bytes -= len(body)
            return await handle(request)

        return handle_read


MAX_DRAINED = 16
"""A body over the limit is read up to this many times the limit before the refusal, so that its sender reads it."""
BODY_SECONDS = 60.0


async def read_body(request: Request, body: bytearray, tenant: Tenant) -> None:
    """Read the body. Raises `HTTPException` for one that is too large (413), too slow (408) or of two lengths (400),
    `LimitReached` or `Overloaded` for more than the tenant, or all, may send at once, and `ClientDisconnect`.
    """
    service = request.app.state.service
    most = service.settings.max_body_bytes
    if "transfer-encoding" in request.headers and "content-length" in request.headers:
        raise HTTPException(400, "has two lengths")
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if len(body) <= most:
                    service.receive(tenant, len(chunk))
                    body += chunk
                if size > MAX_DRAINED * most:
                    break
    except TimeoutError:
        raise HTTPException(408, "the body did not come in time") from None
    if len(body) > most:
        raise HTTPException(413, f"a body has at most {most} bytes")


def _checked(field: Any, content: bytes) -> Any:
    """Return a route's body as its handler gets it. Raises `RequestValidationError`."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        raise RequestValidationError([{"type": "json_invalid", "loc": ("body",), "msg": "", "input": ""}]) from None
    value, errors = field.validate(data, {}, loc=("body",))
    if errors:
        raise RequestValidationError(errors)
    return value


def require_type(request: Request, declared: tuple[str, ...]) -> None:
    """Raise `HTTPException` (415) unless the `Content-Type` is one of `declared`."""
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    is_json = JSON in declared and kind.startswith("application/") and kind.endswith("+json")
    if kind not in declared and not is_json:
        raise HTTPException(415, f"Content-Type={given!r}: must be {' or '.join(declared)}")


def _fail_fast(schema: Any, kinds: Any = (("list", ListSchema), ("dict", DictSchema))) -> None:
    """Let all lists and objects of a schema end at their first wrong item: a body may have millions of them."""
    if isinstance(schema, dict):
        kind = next((one for name, one in kinds if schema.get("type") == name), None)
        if kind and "fail_fast" in kind.__annotations__:  # older versions have it for lists only
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part)


class Body(BaseModel):
    """JSON object of a request. Types are strict; fields that it does not list are kept in `model_extra`."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema


Model = TypeVar("Model", bound=BaseModel)


PLACE = "place"
"""Field of a message: where it stands in the body that it was read from"""


def read_as(model: type[Model], fields: Mapping[str, Any], at: str = "") -> Model:
    """Return the fields of one protocol's body as another's. Raises `RequestError` for the first bad value, with its
    place behind `at`; of a message, behind its own `PLACE`.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = list(map(str, first["loc"]))
        if place[0] == "messages" and len(place) > 1:
            place[:2] = [fields["messages"][int(place[1])].get(PLACE, "")]
        raise RequestError(".".join((at, *place) if at else place), brief(first["input"]), first["msg"]) from None


@contextmanager
def sent_as(names: Mapping[str, str]) -> Iterator[None]:
    """Name fields in errors as the client sent them: another protocol's field -> the one that it was read from."""
    try:
        yield
    except RequestError as error:
        found = next((name for name in names if f"{error.key}.".startswith(f"{name}.")), None)
        if found is not None:
            error.rename(names[found] + error.key.removeprefix(found), error.value)
        raise


def accepted(what: str) -> WrapValidator:
    """Return a validator whose error says what the field accepts, once for all members of its union."""

    def check(value: object, read: Callable[[object], object]) -> object:
        try:
            return read(value)
        except ValidationError:
            raise PydanticCustomError("accepted", "Input should be {what}", {"what": what}) from None

    return WrapValidator(check)


logger = logging.getLogger(__name__)
MAX_MESSAGE_CHARS = 1000
"""A message may quote a value that is as long as a body."""
INVALID_REQUEST, INTERNAL = "invalid_request_error", "internal_error"


class ErrorDetail(BaseModel):
    """Details of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of every error answer, for the API page."""

    error: ErrorDetail


Answers = dict[int | str, dict[str, Any]]
"""Status, or a range of them, -> documentation of the answer."""
STREAMED: Answers = {200: {"content": {EVENTS: {"schema": {}}}}}
ERRORS: Answers = {
    "4XX": {"model": ErrorBody, "description": "The call cannot be served as it is."},
    "5XX": {"model": ErrorBody, "description": "The server has no room now, or its engine has ended."},
}
KINDS: tuple[tuple[type[KedgeError], int, str | None], ...] = (
    (Unauthenticated, 401, "invalid_api_key"),
    (NotFound, 404, "not_found"),
    (LimitReached, 429, "rate_limit_exceeded"),
    (Overloaded, 503, OVERLOADED),
    (OutOfBlocks, 503, OVERLOADED),
    (EngineClosed, 503, "engine_closed"),
    (PromptTooLong, 400, "context_length_exceeded"),
    (RequestError, 400, None),
    (WorkflowError, 400, None),
    (KedgeError, 500, INTERNAL),
)
"""Errors with their statuses and codes; the first match counts."""
CODES = {
    400: "invalid_request", 404: "not_found", 405: "method_not_allowed", 408: "request_timeout",
    413: "request_too_large", 415: "unsupported_media_type", 421: "untrusted_host",
}  # fmt: skip
"""Status of what is refused before it reaches its route -> its code"""
ANTHROPIC_TYPES = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
    500: "api_error", 503: "overloaded_error",
}  # fmt: skip
"""Status of an error -> its type in Anthropic's API; of all others `invalid_request_error`"""
SOURCES = frozenset({"body", "query", "path", "header"})
"""First part of the location of a bad value in FastAPI's errors, which is no field's name."""
NO_OBJECT = frozenset({"dict_type", "model_type", "model_attributes_type"})
"""Pydantic's errors whose messages name Python types."""


@dataclass(frozen=True, slots=True)
class CallFailure:
    """The error that a call or a run ended in: what its client reads, and where it happened."""

    status: int
    code: str | None
    reason: str
    param: str | None = None
    route: str = ""
    """Method and path, for a call."""
    workflow: str = ""
    agent: str = ""
    run: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Return the failure of an error. That of an unexpected one has a general message: its own is for the log."""
        code: str | None = INTERNAL
        param: str | None = None
        status, reason = 500, "internal error of the server, see its log"
        match error:
            case KedgeError():
                status, code = next((status, code) for kind, status, code in KINDS if isinstance(error, kind))
                own = {(404, "model"): "model_not_found", (400, "previous_response_id"): "previous_response_not_found"}
                code = own.get((status, error.key), code)
                notes = "; ".join(getattr(error, "__notes__", []))
                reason = f"{error} ({notes})" if notes else str(error)
                param = error.key if status in (400, 404) else None
            case RequestValidationError():
                first, status, code, reason = error.errors()[0], 400, None, "the body must be JSON"
                if first["type"] != "json_invalid":
                    place = [str(part) for part in first["loc"][first["loc"][0] in SOURCES :]]
                    why = "Input should be an object" if first["type"] in NO_OBJECT else first["msg"]
                    given = "" if first["type"] == "missing" else f"={brief(first['input'])!r}"
                    reason, param = f"{'.'.join(place) or 'body'}{given}: {why}", place[0] if place else None
            case HTTPException():
                status, code, reason = error.status_code, CODES.get(error.status_code), str(error.detail)
                param = "Host" if status == 421 else None
        return cls(status, code, reason[:MAX_MESSAGE_CHARS] + "…" * (len(reason) > MAX_MESSAGE_CHARS), param)

    def at(self, request: Request) -> Self:
        """Return the failure with its call; its agent is known once the call's hints were read."""
        known = replace(self, route=f"{request.method} {request.scope['path']}")
        hints = getattr(request.state, "hints", None)
        return replace(known, workflow=hints.workflow, agent=hints.agent, run=hints.run) if hints else known

    @property
    def kind(self) -> str:
        """`refused` where the client or a limit was the cause, `failed` where it was the server."""
        return "refused" if self.status < 500 or self.code == OVERLOADED else "failed"

    def body(self) -> dict[str, Any]:
        """Return it as the body of an answer or the data of a stream's event, in the dialect of its call."""
        error = {"message": self.reason, "type": self.type, "param": self.param, "code": self.code}
        if not self.route.partition(" ")[2].startswith("/v1/messages"):
            return {"error": error}
        return {"type": "error", "error": {**error, "type": ANTHROPIC_TYPES.get(self.status, INVALID_REQUEST)}}

    @property
    def type(self) -> str:
        """The kind of error in OpenAI's words."""
        return "rate_limit_error" if self.status == 429 else "server_error" if self.status >= 500 else INVALID_REQUEST


async def answer_error(request: Request, error: Exception) -> JSONAnswer:
    """Return the answer to a call that ended in an error, in its client's dialect; count it, and report it, for the
    calling tenant, if it is known.
    """
    failure, path = CallFailure.of(error).at(request), request.scope["path"]
    headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}.get(failure.status, {})
    if isinstance(error, LimitReached):
        headers = {"Retry-After": str(math.ceil(error.retry_after))}
    elif isinstance(error, HTTPException):
        headers = dict(error.headers or {})
    elif isinstance(error, KedgeError) and failure.status == 500:  # Starlette logs those of others
        logger.error("a call failed: %s", error)
    tenant, service = getattr(request.state, "tenant", None), request.app.state.service
    is_listed = path.startswith("/v1/") and not path.startswith("/v1/dashboard/")
    service.failed(tenant.id if tenant else None, failure, is_listed=is_listed)
    return JSONAnswer(failure.body(), failure.status, headers=headers)


# receipts ------------------------------------------------------------------------------------------------------------


def receipt(completion: Completion) -> dict[str, Any]:
    """Return where the prompt's tokens came from, and the timings.

    The engine's request ids are left out: their numbers would reveal how much other tenants ask for.
    """
    found = completion.receipt
    return {
        "mode": found.mode,
        "tokens": {source.value: found.tokens(source) for source in Source},
        "preassembled": found.preassembled,
        "misses": [{"segment": miss.segment, "reason": miss.reason} for miss in found.misses],
        "guard": [asdict(note) for note in found.guard],
        "fidelity": found.fidelity and asdict(found.fidelity),
        "parts_ms": dict(found.parts_ms),
        "ttft_ms": completion.ttft_ms,
        "total_ms": completion.total_ms,
    }


def usage(completions: Sequence[Completion], per_prompt: int) -> dict[str, Any]:
    """Return the token counts of a call.

    A prompt counts once for all of its `per_prompt` choices, with the cached tokens of its first choice.
    """
    receipts = [completion.receipt for completion in completions[::per_prompt]]
    prompt_tokens = sum(one.prompt_tokens for one in receipts)
    completion_tokens = sum(len(completion.tokens) for completion in completions)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(one.exact for one in receipts)},
    }
