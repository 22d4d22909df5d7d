"""The `Host` headers that a server answers to.

A web page can point a name of its own at 127.0.0.1 (DNS rebinding); its scripts would then have the rights of a page
that the server itself sent. Such a call bears the page's name in `Host`, so names must be known. An address proves that
no name was pointed anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kedge.server.errors import refusal

ANY = "*"
PROBES = frozenset({"/health", "/ready"})
"""Paths that answer to every `Host`: they say nothing worth protecting, and probes call them by addresses that nobody
knows beforehand."""
_HEADER = re.compile(r"(\[[^\[\]]+\]|[^\[\]:]+)(?::[0-9]*)?")
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class TrustedHosts:
    """Host names and addresses, whatever the port: those of the loopback interface, those that were allowed, and the
    one that the server is bound to. Bound to every address (`0.0.0.0`, `::`), it has any of them."""

    def __init__(self, bound: str, allowed: Iterable[str]) -> None:
        own = _normal(bound or "0.0.0.0")
        self._known = {own, "localhost", *map(_normal, allowed)}
        self._any_address = not isinstance(own, str) and own.is_unspecified

    def trusts(self, values: Sequence[str]) -> bool:
        """Return whether the values of a call's `Host` headers, of which there must be one, are trusted."""
        if ANY in self._known:
            return True
        found = _HEADER.fullmatch(values[0]) if len(values) == 1 else None
        if found is None:
            return False
        host = _normal(found[1])
        if isinstance(host, str):
            return host in self._known
        return host.is_loopback or self._any_address or host in self._known


def is_host(text: str) -> bool:
    """Return whether `text` is a host name or an address without a port, or `*`."""
    return text == ANY or bool(_NAME.fullmatch(text)) or not isinstance(_normal(text), str)


def _normal(host: str) -> str | IPv4Address | IPv6Address:
    """Return the address that `host` spells, in whatever form, or else the name in lower case."""
    try:
        address = ip_address(host[1:-1] if host[:1] + host[-1:] == "[]" else host)
    except ValueError:
        return host.lower().removesuffix(".")
    return getattr(address, "ipv4_mapped", None) or address


class HostCheck:
    """Middleware that refuses calls with a `Host` that is not trusted: 421.

    Starlette's `TrustedHostMiddleware` knows neither networks (127.0.0.0/8) nor paths that are open to every host,
    takes IPv6 addresses apart at their colons in older versions, and answers in plain text.
    """

    def __init__(self, app: ASGIApp, hosts: TrustedHosts) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).getlist("host")
        if self._hosts.trusts(given):
            await self._app(scope, receive, send)
            return
        why = f"Host={', '.join(given)!r}: is not a name of this server (kedge serve --allowed-host NAME adds one)"
        await refusal(421, why, "untrusted_host", param="Host")(scope, receive, send)
