"""What strangers may do: the check of `Host` headers, and bounds of connections and of heads of requests."""

import asyncio
import re
import resource
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from kedge.checks import parse_host
from kedge.server.http import BODY_SECONDS, answer_error

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol
else:
    Protocol = AutoHTTPProtocol

ANY = "*"
PROBES = frozenset({"/health", "/ready"})
"""Paths that accept every `Host`: they reveal nothing, and probes use addresses that are not known beforehand."""
_HEADER = re.compile(r"(\[[^\[\]]+\]|[^\[\]:]+)(?::[0-9]*)?")


class HostCheck:
    """Middleware that refuses calls whose `Host` is not trusted (421), against DNS rebinding.

    A web page can point its own host name at 127.0.0.1; its scripts would then have the rights of a page of this
    server. Such a call has the page's name in `Host`, so names must be known. An address proves that no name was
    redirected. Trusted are, with any port, the loopback interface's names and addresses, the allowed ones, and the one
    that the server is bound to. If it is bound to every address (`0.0.0.0`, `::`), every address is trusted.

    Starlette's `TrustedHostMiddleware` supports neither networks (127.0.0.0/8) nor exempt paths, splits IPv6 addresses
    at their colons in older versions, and answers in plain text.
    """

    def __init__(self, app: ASGIApp, bound: str, allowed: Iterable[str] = ()) -> None:
        own = parse_host(bound or "0.0.0.0")
        self._app, self._known = app, {own, "localhost", *map(parse_host, allowed)}
        self._any_address = not isinstance(own, str) and own.is_unspecified

    def trusts(self, values: Sequence[str]) -> bool:
        """Return whether a call's `Host` headers are exactly one, and trusted."""
        if ANY in self._known:
            return True
        found = _HEADER.fullmatch(values[0]) if len(values) == 1 else None
        if found is None:
            return False
        host = parse_host(found[1])
        if isinstance(host, str):
            return host in self._known
        return host.is_loopback or self._any_address or host in self._known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") == "HEAD":  # of which the server leaves out the body
            scope = {**scope, "method": "GET"}
        given = Headers(scope=scope).getlist("host") if scope["type"] == "http" else []
        if scope["type"] != "http" or scope["path"] in PROBES or self.trusts(given):
            await self._app(scope, receive, send)
            return
        why = f"Host={', '.join(given)!r}: is not a name of this server (kedge serve --allowed-host NAME adds one)"
        await (await answer_error(Request(scope), HTTPException(421, why)))(scope, receive, send)


def open_files(most: int = 1 << 15) -> int:
    """Raise the soft limit of open files to `most`, as far as the hard limit and the system allow it, and return how
    many there may be, at most `most`. Shells often set it to 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY != hard and soft < (room := min(most, hard)):
        with suppress(ValueError, OSError):  # in a sandbox, or where the kernel allows less than the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (room, hard))
            soft = room
    return most if soft == resource.RLIM_INFINITY else min(most, soft)


def most_connections() -> int:
    """Return how many connections are kept: half of the files, as more are accepted before any can be cut."""
    return min(4096, open_files() // 2)


class BoundedConnection(Protocol):
    """A connection that is cut if the head of a request does not come in time, or an answer is not read.

    Once there are too many connections, the oldest of those that wait for one of these is cut, else the new one.
    """

    head_seconds = 75  # proxies call again on connections that were idle for 60
    _waits: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive = self.head_seconds
        if len(self.connections) > most_connections():
            waiting: Any = [one for one in self.connections if getattr(one, "_waits", None)]
            min(waiting, key=lambda one: one._waits.when(), default=self).cut()
        self._wait(self.head_seconds)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._go_on()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait(BODY_SECONDS)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._go_on()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # else that of the next request, which has come already
            self._wait(self.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def cut(self) -> None:
        """End the connection at once."""
        self._stop()
        self.connections.discard(self)
        self.transport.abort()

    def _wait(self, seconds: float) -> None:
        if self._waits is None and not self.transport.is_closing():
            self._waits = self.loop.call_later(seconds, self.cut)

    def _go_on(self) -> None:
        """Wait for nothing while a request is answered and its client reads that."""
        if self.cycle is not None and not (self.cycle.response_complete or self.flow.write_paused):
            self._stop()

    def _stop(self) -> None:
        if self._waits is not None:
            self._waits.cancel()
            self._waits = None
