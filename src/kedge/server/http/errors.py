"""Error answers in the format of OpenAI's API: `{"error": {"message", "type", "param", "code"}}` and a status."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

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
from kedge.server.failures import CallFailure
from kedge.server.http.sse import JSONAnswer

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
    421: {"model": ErrorBody, "description": "`Host` names no host that this server answers to."},
    "4XX": {"model": ErrorBody, "description": "The call cannot be served as it is."},
    "5XX": {"model": ErrorBody, "description": "The server has no room now, or its engine has ended."},
}
BODY_ERRORS: Answers = {
    400: {"model": ErrorBody, "description": "The body cannot be read, or has a wrong value."},
    415: {"model": ErrorBody, "description": "The body has another type than those that are read."},
}
"""Errors of routes that read a body, besides `ERRORS`."""
JSON, EVENTS = ("application/json",), ("text/event-stream",)


def answers(*statuses: int, kinds: Iterable[str] = JSON) -> Answers:
    """Return the documentation of a route's answers: their statuses and content types."""
    content: dict[str, Any] = {kind: {"schema": {}} for kind in kinds}
    return {status: {"description": "Successful", "content": content} for status in statuses}


class Problem(NamedTuple):
    """Status, type and code of an error answer."""

    status: int
    type: str
    code: str | None


KINDS: tuple[tuple[type[KedgeError], Problem], ...] = (
    (Unauthenticated, Problem(401, INVALID_REQUEST, "invalid_api_key")),
    (NotFound, Problem(404, INVALID_REQUEST, "not_found")),
    (LimitReached, Problem(429, "rate_limit_error", "rate_limit_exceeded")),
    (Overloaded, Problem(503, "server_error", "overloaded")),
    (OutOfBlocks, Problem(503, "server_error", "overloaded")),
    (EngineClosed, Problem(503, "server_error", "engine_closed")),
    (PromptTooLong, Problem(400, INVALID_REQUEST, "context_length_exceeded")),
    (RequestError, Problem(400, INVALID_REQUEST, None)),
    (WorkflowError, Problem(400, INVALID_REQUEST, None)),
)
"""The first match counts; any other error is an internal one."""
SOURCES = frozenset({"body", "query", "path", "header"})
"""First part of the location of a bad value in FastAPI's errors, which is no field's name."""
NO_OBJECT = frozenset({"dict_type", "model_type", "model_attributes_type"})
"""Pydantic's errors whose messages name Python types."""
INTERNAL = Problem(500, "server_error", "internal_error")
BUG = "internal error of the server, see its log"


def problem_of(error: KedgeError) -> Problem:
    """Return the status, type and code for `error`."""
    found = next((problem for kind, problem in KINDS if isinstance(error, kind)), INTERNAL)
    return found._replace(code="model_not_found") if isinstance(error, NotFound) and error.key == "model" else found


def problem_body(message: str, problem: Problem, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error answer."""
    short = message if len(message) <= MAX_MESSAGE_CHARS else f"{message[:MAX_MESSAGE_CHARS]}…"
    return {"error": {"message": short, "type": problem.type, "param": param, "code": problem.code}}


def refusal(status: int, why: str, code: str, param: str | None = None) -> JSONAnswer:
    """Return the answer to a call that is refused before it reaches its route."""
    return JSONAnswer(problem_body(why, Problem(status, INVALID_REQUEST, code), param), status)


def error_body(error: KedgeError) -> dict[str, Any]:
    """Return `error` as the body of an answer or the data of a stream's event."""
    problem = problem_of(error)
    notes = getattr(error, "__notes__", [])
    message = f"{error} ({'; '.join(notes)})" if notes else str(error)
    return problem_body(message, problem, error.key if problem.status in (400, 404) else None)


def install(app: FastAPI) -> None:
    """Answer every error of `app` in this format."""
    app.add_exception_handler(KedgeError, _kedge_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _bug)


async def _kedge_error(request: Request, error: Exception) -> JSONAnswer:
    assert isinstance(error, KedgeError)
    status = problem_of(error).status
    if status == INTERNAL.status:
        logger.error("a call failed: %s", error)
    return _answer(request, error_body(error), status, _headers(error, status))


def _headers(error: KedgeError, status: int) -> dict[str, str]:
    if isinstance(error, LimitReached):
        return {"Retry-After": str(math.ceil(error.retry_after))}
    if status == 401:
        return {"WWW-Authenticate": "Bearer"}
    return {"Retry-After": "1"} if status == 503 else {}


async def _validation_error(request: Request, error: Exception) -> JSONAnswer:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = [str(part) for part in first["loc"][first["loc"][0] in SOURCES :]]
    is_json = first["type"] != "json_invalid"
    why = "Input should be an object" if first["type"] in NO_OBJECT else first["msg"]
    message = f"{'.'.join(place) or 'body'}: {why}" if is_json else "the body must be JSON"
    param = place[0] if is_json and place else None
    return _answer(request, problem_body(message, Problem(400, INVALID_REQUEST, None), param), 400)


async def _http_error(request: Request, error: Exception) -> JSONAnswer:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed", 415: "unsupported_media_type"}.get(error.status_code)
    kind = INVALID_REQUEST if error.status_code < 500 else INTERNAL.type
    body = problem_body(str(error.detail), Problem(error.status_code, kind, code))
    return _answer(request, body, error.status_code, error.headers)


async def _bug(request: Request, error: Exception) -> JSONAnswer:  # noqa: ARG001 (Starlette logs it)
    return _answer(request, problem_body(BUG, INTERNAL), INTERNAL.status)


def _answer(
    request: Request, body: dict[str, Any], status: int, headers: Mapping[str, str] | None = None
) -> JSONAnswer:
    """Return the answer; count it, and report it, for the calling tenant, if it is known."""
    tenant, service = getattr(request.state, "tenant", None), request.app.state.service
    path, owner = request.url.path, tenant.id if tenant else None
    if path.startswith("/v1/") and not path.startswith("/v1/dashboard/"):
        service.failed(owner, failure_of(request, body, status))
    else:
        service.metrics.failed(owner or "", status)
    return JSONAnswer(_in_dialect(path, body), status, headers=headers)


def _in_dialect(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return an error's body as the protocol of its route has it."""
    return {"type": "error", **body} if path.startswith("/v1/messages") else body


def failure_of(request: Request, body: Mapping[str, Any], status: int) -> CallFailure:
    """Return the record of a call that was answered with an error; its agent is known once its hints were read."""
    error, hints = body["error"], getattr(request.state, "hints", None)
    route = f"{request.method} {unquote(request.url.path)}"
    agent = {"workflow": hints.workflow, "agent": hints.agent, "run": hints.run} if hints else {}
    return CallFailure(status, error["code"] or error["type"], error["message"], route, **agent)
