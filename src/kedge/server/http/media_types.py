"""Routes that accept only bodies in the media types that they declare.

This also keeps out web pages of other sites: a browser lets them send forms and plain text freely, but makes a
preflight request before JSON or YAML, which this server does not grant. A body without a type is refused for the same
reason.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
JSON = "application/json"
YAML = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")
"""RFC 9512, and older names."""


class TypedRoute(APIRoute):
    """Route that answers 415 to a body in a type that it does not declare."""

    def get_route_handler(self) -> Handler:
        handle, declared = super().get_route_handler(), self._declared()

        async def handle_declared(request: Request) -> Response:
            if declared:
                require_type(request, declared)
            return await handle(request)

        return handle_declared

    def _declared(self) -> tuple[str, ...]:
        """Return the accepted types; none for a route that reads no body."""
        body = (self.openapi_extra or {}).get("requestBody", {})
        return tuple(body.get("content", ())) or ((JSON,) if self.body_field else ())


def require_type(request: Request, declared: tuple[str, ...]) -> None:
    """Raise `HTTPException` (415) unless the `Content-Type` is one of `declared`."""
    given = request.headers.get("content-type", "")
    if not _is_one_of(given.partition(";")[0].strip().lower(), declared):
        raise HTTPException(415, f"Content-Type={given!r}: must be {' or '.join(declared)}")


def _is_one_of(given: str, declared: tuple[str, ...]) -> bool:
    return given in declared or (JSON in declared and given.startswith("application/") and given.endswith("+json"))
