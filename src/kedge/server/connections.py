"""Connections of a server without a proxy: how many there are, and how long the head of a request may take."""

from __future__ import annotations

import asyncio
import resource
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol
else:
    Protocol = AutoHTTPProtocol


def most_connections(most: int = 4096, spare: int = 128) -> int:
    """Return how many connections the process can have open, besides `spare` files of its own."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if files == resource.RLIM_INFINITY else max(spare // 4, min(most, files - spare))


class BoundedConnection(Protocol):
    """A connection that is cut if the head of a request does not come in time.

    Once there are too many connections, the oldest of those that wait for a head is cut, else the new one.
    """

    head_seconds = 15.0
    _waits: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            waiting: Any = [one for one in self.connections if getattr(one, "_waits", None)]
            min(waiting, key=lambda one: one._waits.when(), default=self).cut()
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._await_head()
        else:
            self._has_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_head()
        super().connection_lost(exc)

    def cut(self) -> None:
        """End the connection at once."""
        self._has_head()
        self.connections.discard(self)
        self.transport.abort()

    def _await_head(self) -> None:
        if self._waits is None and not self.transport.is_closing():
            self._waits = self.loop.call_later(self.head_seconds, self.cut)

    def _has_head(self) -> None:
        if self._waits is not None:
            self._waits.cancel()
            self._waits = None
