"""Bodies, answers and errors of HTTP calls, without engines.

Errors are answered in the format of OpenAI's API: `{"error": {"message", "type", "param", "code"}}` and a status.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import DictSchema, ListSchema
from starlette.exceptions import HTTPException
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
from kedge.server.threads import Threads
from kedge.types import Completion, Source

OVERLOADED = "overloaded"


@dataclass(frozen=True, slots=True)
class CallFailure:
    """A call or a run that ended in an error."""

    status: int
    code: str
    reason: str
    route: str = ""
    """Method and path, for a call."""
    workflow: str = ""
    agent: str = ""
    run: str = ""

    @property
    def kind(self) -> str:
        """`refused` where the client or a limit was the cause, `failed` where it was the server."""
        return "refused" if self.status < 500 or self.code == OVERLOADED else "failed"


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
    head = f"event: {name}\n" if name else ""
    head += f"id: {number}\n" if number is not None else ""
    return head.encode() + b"data: " + dumps(data) + b"\n\n"


class JSONAnswer(Response):
    """Answer with a JSON body, see `dumps`."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)


class EventStream(StreamingResponse):
    """Answer of server-sent events. `on_end` is called exactly once, even if the stream never began."""

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


JSON_TYPE = "application/json"
YAML = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")
"""RFC 9512, and older names."""


class TypedRoute(APIRoute):
    """Route that answers 415 to a body in a media type that it does not declare, or without a type, and reads long
    bodies off the event loop.

    This keeps out web pages of other sites: a browser lets them send forms and plain text freely, but makes a preflight
    request before JSON or YAML, which this server does not grant.
    """

    def get_route_handler(self, long_body: int = 1 << 16) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        body = (self.openapi_extra or {}).get("requestBody", {})
        declared = tuple(body.get("content", ())) or ((JSON_TYPE,) if self.body_field else ())
        handle = super().get_route_handler()

        async def handle_declared(request: Request) -> Response:
            if declared:
                require_type(request, declared)
            if self.body_field and len(content := await request.body()) > long_body:
                threads: Threads = request.app.state.service.threads
                request._json = await threads.work(partial(_checked, self.body_field, content))
            return await handle(request)

        return handle_declared


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
    is_json = JSON_TYPE in declared and kind.startswith("application/") and kind.endswith("+json")
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


def read_as(model: type[Model], fields: Mapping[str, Any], at: str = "", places: Sequence[str] = ()) -> Model:
    """Return the fields of one protocol's body as another's. Raises `RequestError` for the first bad value, with its
    place behind `at`; of a message, behind its place in `places`.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = list(map(str, first["loc"]))
        if places and place[0] == "messages" and len(place) > 1:
            place[:2] = [places[int(place[1])]]
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

    def check(value: object, read: ValidatorFunctionWrapHandler) -> object:
        try:
            return read(value)
        except ValidationError:
            raise PydanticCustomError("accepted", "Input should be {what}", {"what": what}) from None

    return WrapValidator(check)


logger = logging.getLogger(__name__)
MAX_MESSAGE_CHARS = 1000
"""A message may quote a value that is as long as a body."""
INVALID_REQUEST = "invalid_request_error"


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
ERRORS: Answers = {
    "4XX": {"model": ErrorBody, "description": "The call cannot be served as it is."},
    "5XX": {"model": ErrorBody, "description": "The server has no room now, or its engine has ended."},
}
JSON, EVENTS = ("application/json",), ("text/event-stream",)


def answers(*statuses: int, kinds: Iterable[str] = JSON) -> Answers:
    """Return the documentation of a route's answers: their statuses and content types."""
    content: dict[str, Any] = {kind: {"schema": {}} for kind in kinds}
    return {status: {"description": "Successful", "content": content} for status in statuses}


class Problem(NamedTuple):
    """Status and code of an error answer."""

    status: int
    code: str | None


KINDS: tuple[tuple[type[KedgeError], Problem], ...] = (
    (Unauthenticated, Problem(401, "invalid_api_key")),
    (NotFound, Problem(404, "not_found")),
    (LimitReached, Problem(429, "rate_limit_exceeded")),
    (Overloaded, Problem(503, OVERLOADED)),
    (OutOfBlocks, Problem(503, OVERLOADED)),
    (EngineClosed, Problem(503, "engine_closed")),
    (PromptTooLong, Problem(400, "context_length_exceeded")),
    (RequestError, Problem(400, None)),
    (WorkflowError, Problem(400, None)),
)
"""The first match counts; any other error is an internal one."""
SOURCES = frozenset({"body", "query", "path", "header"})
"""First part of the location of a bad value in FastAPI's errors, which is no field's name."""
NO_OBJECT = frozenset({"dict_type", "model_type", "model_attributes_type"})
"""Pydantic's errors whose messages name Python types."""
INTERNAL = Problem(500, "internal_error")
BUG = "internal error of the server, see its log"


def problem_of(error: KedgeError) -> Problem:
    """Return the status and the code for `error`."""
    found = next((problem for kind, problem in KINDS if isinstance(error, kind)), INTERNAL)
    return found._replace(code="model_not_found") if isinstance(error, NotFound) and error.key == "model" else found


def problem_body(message: str, problem: Problem, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error answer."""
    short = message if len(message) <= MAX_MESSAGE_CHARS else f"{message[:MAX_MESSAGE_CHARS]}…"
    kind = "rate_limit_error" if problem.status == 429 else "server_error" if problem.status >= 500 else INVALID_REQUEST
    return {"error": {"message": short, "type": kind, "param": param, "code": problem.code}}


ANTHROPIC_TYPES = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
    500: "api_error", 503: "overloaded_error",
}  # fmt: skip
"""Status of an error -> its type in Anthropic's API; of all others `invalid_request_error`"""


def in_dialect(path: str, body: dict[str, Any], status: int) -> dict[str, Any]:
    """Return the body of an error as clients of this path read it."""
    if not path.startswith("/v1/messages"):
        return body
    return {"type": "error", "error": {**body["error"], "type": ANTHROPIC_TYPES.get(status, INVALID_REQUEST)}}


def error_body(error: KedgeError) -> dict[str, Any]:
    """Return `error` as the body of an answer or the data of a stream's event."""
    problem = problem_of(error)
    notes = getattr(error, "__notes__", [])
    message = f"{error} ({'; '.join(notes)})" if notes else str(error)
    return problem_body(message, problem, error.key if problem.status in (400, 404) else None)


CODES = {
    400: "invalid_request", 404: "not_found", 405: "method_not_allowed", 408: "request_timeout",
    413: "request_too_large", 415: "unsupported_media_type", 421: "untrusted_host",
}  # fmt: skip
"""Status of what is refused before it reaches its route -> its code"""


def install_errors(app: FastAPI) -> None:
    """Answer every error of `app` in this format."""
    for kind in (KedgeError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer_error)


async def answer_error(request: Request, error: Exception) -> JSONAnswer:
    """Return the answer to a call that ended in an error; count it, and report it, for the calling tenant, if it is
    known.
    """
    path, status, headers = request.scope["path"], INTERNAL.status, dict[str, str]()
    body = problem_body(BUG, INTERNAL)  # Starlette logs it
    match error:
        case KedgeError():
            body, status = error_body(error), problem_of(error).status
            if status == INTERNAL.status:
                logger.error("a call failed: %s", error)
            headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}.get(status, {})
            if isinstance(error, LimitReached):
                headers = {"Retry-After": str(math.ceil(error.retry_after))}
            if isinstance(error, PromptTooLong) and path.startswith("/v1/messages"):  # which clients look for
                body["error"]["message"] = f"prompt is too long: {error.tokens} tokens > {error.most} maximum"
        case RequestValidationError():
            first, status = error.errors()[0], 400
            place = [str(part) for part in first["loc"][first["loc"][0] in SOURCES :]]
            is_json = first["type"] != "json_invalid"
            why = "Input should be an object" if first["type"] in NO_OBJECT else first["msg"]
            message = f"{'.'.join(place) or 'body'}: {why}" if is_json else "the body must be JSON"
            param = place[0] if is_json and place else None
            body = problem_body(message, Problem(400, None), param)
        case HTTPException():
            status, headers = error.status_code, dict(error.headers or {})
            param = "Host" if status == 421 else None
            body = problem_body(str(error.detail), Problem(status, CODES.get(status)), param)
    tenant, service = getattr(request.state, "tenant", None), request.app.state.service
    owner = tenant.id if tenant else None
    if path.startswith("/v1/") and not path.startswith("/v1/dashboard/"):
        service.failed(owner, failure_of(request, body, status))
    else:
        service.metrics.errors.labels(owner or "", status).inc()
    return JSONAnswer(in_dialect(path, body, status), status, headers=headers)


def failure_of(request: Request, body: Mapping[str, Any], status: int) -> CallFailure:
    """Return the record of a call that was answered with an error; its agent is known once its hints were read."""
    error, hints = body["error"], getattr(request.state, "hints", None)
    route = f"{request.method} {request.scope['path']}"
    agent = {"workflow": hints.workflow, "agent": hints.agent, "run": hints.run} if hints else {}
    return CallFailure(status, error["code"] or error["type"], error["message"], route, **agent)


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
