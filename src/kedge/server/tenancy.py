"""Who calls, and how much they may have: API keys, tenants, limits.

A tenant is what the server authenticated, never what a client says. With no keys at all there is one tenant.

    [tenants.acme]                              # a TOML file; `kedge serve --new-key acme` makes a key
    keys = ["sha256:0a1b…"]
    requests_in_flight = 8
    tokens_per_minute = 100000
    hints_per_minute = 12000
    anchors = 200
    anchor_bytes = "64MiB"
    host_memory = "1GiB"
    [operator]                                  # may read all metrics, and nothing else
    keys = ["sha256:…"]

    KEDGE_API_KEYS=acme:sha256:0a1b…,other:sha256:…,*:sha256:…          # the same in the environment; * is the operator
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import secrets
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kedge.engine.base import Engine, Limiting, Quota
from kedge.errors import ConfigError, LimitReached, RequestError, Unauthenticated
from kedge.settings import LimitSettings
from kedge.types import Namespace, TenantId

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
OPERATOR = "*"
MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What a tenant may have; None is no limit. Raises `ConfigError` for a limit below 1."""

    requests_in_flight: int = 64
    """Generations (each of `n` choices is one) and runs at once."""
    tokens_per_minute: int | None = None
    """Prompt and answer together; a minute's worth may be used at once."""
    hints_per_minute: int = 12_000
    """Hints without a prompt: a call counts one, and one more for each agent that its forecast speaks of. A minute's
    worth may be used at once."""
    anchors: int | None = None
    """Anchors in all its pools."""
    anchor_bytes: int | None = None
    """Bytes of its anchors."""
    host_memory: int | None = None
    """Bytes of the host tier."""

    def __post_init__(self) -> None:
        for key in self.__slots__:
            value = getattr(self, key)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(key, value, "must be a whole number, at least 1")

    @property
    def quota(self) -> Quota:
        """What of it the engine watches over."""
        return Quota(self.anchors, self.anchor_bytes, self.host_memory)


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whom the server authenticated."""

    id: TenantId
    limits: Limits
    is_operator: bool = False

    def namespace(self, salt: str) -> Namespace:
        """Return the namespace of calls with this salt: each salt has a partition of the tenant's data."""
        return Namespace(self.id, _digest(salt)[:32] if salt else "")


def new_key() -> str:
    """A key with 256 random bits: so many that one round of SHA-256 is all that its hash needs."""
    return f"sk-kedge-{secrets.token_urlsafe(32)}"


def hashed(key: str) -> str:
    """A key as files and variables hold it."""
    return f"sha256:{_digest(key)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


class KeyRing:
    """API keys, as hashes, and whose they are."""

    def __init__(self, tenants: Mapping[str, Tenant], default: Limits) -> None:
        """`tenants` is by hash, see `hashed`. Without any, everyone is the tenant `default`, with its limits."""
        self._tenants = {digest.encode(): tenant for digest, tenant in tenants.items()}
        self._everyone = Tenant(TenantId("default"), default, is_operator=True)

    @property
    def tenants(self) -> list[Tenant]:
        """Everyone who may generate, each once."""
        known = {tenant.id: tenant for tenant in self._tenants.values() if tenant.id != OPERATOR}
        return [self._everyone] if self.is_open else list(known.values())

    @property
    def is_open(self) -> bool:
        """Whether no key is asked for."""
        return not self._tenants

    def authenticate(self, authorization: str | None) -> Tenant:
        """The tenant of an `Authorization` header. Raises `Unauthenticated`; all keys are compared, each in constant
        time."""
        if self.is_open:
            return self._everyone
        scheme, _, key = (authorization or "").partition(" ")
        presented = hashed(key.strip()).encode() if scheme.lower() == "bearer" else b""
        found = [tenant for known, tenant in self._tenants.items() if hmac.compare_digest(known, presented)]
        if not found:
            raise Unauthenticated("Authorization", "…", "send a known API key as `Bearer KEY`")
        return found[0]


def load_keys(file: Path | None, variable: str | None, default: Limits) -> KeyRing:
    """Keys of a file and of `KEDGE_API_KEYS`. Raises `ConfigError` naming what is wrong, never a key."""
    tenants: dict[str, Tenant] = {}
    for digest, tenant in (*_of_file(file, default), *_of_variable(variable or "", default)):
        if digest in tenants:
            raise ConfigError("api key", tenant.id, "the same key is there twice")
        tenants[digest] = tenant
    return KeyRing(tenants, default)


def _of_file(file: Path | None, default: Limits) -> Iterator[tuple[str, Tenant]]:
    if file is None:
        return
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError("--api-keys", str(file), str(error)) from None
    _only(data, {"tenants", "operator"}, str(file))
    sections = {f"tenants.{name}": (name, section) for name, section in _table(data, "tenants").items()}
    if "operator" in data:
        sections["operator"] = (OPERATOR, data["operator"])
    for key, (name, section) in sections.items():
        yield from _of_section(f"{file}: {key}", name, section, default)


def _table(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = data.get(key, {})
    if not isinstance(table, dict):
        raise ConfigError(key, type(table).__name__, "must be a table")
    return table


def _of_section(key: str, name: str, section: object, default: Limits) -> Iterator[tuple[str, Tenant]]:
    if not isinstance(section, dict):
        raise ConfigError(key, type(section).__name__, "must be a table with `keys`")
    limits = {name for name in Limits.__slots__ if name in section}
    _only(section, {"keys", *limits}, key)
    keys = section.get("keys")
    if not isinstance(keys, list) or not keys:
        raise ConfigError(f"{key}.keys", type(keys).__name__, "must be a list of hashes, with at least one")
    own = replace(default, **{limit: _limit(key, limit, section[limit]) for limit in limits})
    for digest in keys:
        yield _hash(digest, key), _tenant(name, own)


def _limit(key: str, name: str, value: object) -> int:
    """A limit as the settings understand it: sizes may have units."""
    if isinstance(value, bool):
        raise ConfigError(f"{key}.{name}", value, "is not a number")
    try:
        limit: int = getattr(LimitSettings(**{name: value}), name)
    except ConfigError as error:
        raise ConfigError(f"{key}.{name}", value, error.why) from None
    return limit


def _of_variable(text: str, default: Limits) -> Iterator[tuple[str, Tenant]]:
    for entry in filter(None, re.split(r"[,\s]+", text)):
        name, _, digest = entry.partition(":")
        yield _hash(digest, f"KEDGE_API_KEYS: {name}"), _tenant(name, default)


def _only(section: Mapping[str, Any], known: set[str], key: str) -> None:
    for name in section:
        if name not in known:
            raise ConfigError(f"{key}.{name}", "…", "there is no such setting")


def _hash(value: object, key: str) -> str:
    """A hash as it stands. The value is not named in the error: it may be a key by mistake."""
    if not isinstance(value, str) or not _HASH.fullmatch(value):
        raise ConfigError(
            key, "…", "a key is written as `sha256:` and 64 hex digits; `kedge serve --new-key` makes one"
        )
    return value


def _tenant(name: str, limits: Limits) -> Tenant:
    if name == OPERATOR:
        return Tenant(TenantId(OPERATOR), limits, is_operator=True)
    if not _NAME.fullmatch(name):
        raise ConfigError("tenant", name, "a name has up to 64 letters, digits, '_', '.' and '-'")
    return Tenant(TenantId(name), limits)


def apply_quotas(engine: Engine, tenants: Iterable[Tenant]) -> None:
    """Tells the engine what tenants may hold. Raises `ConfigError` for a limit that the engine cannot keep."""
    for tenant in tenants:
        if isinstance(engine, Limiting):
            engine.limit(tenant.id, tenant.limits.quota)
        elif tenant.limits.quota != Quota():
            raise ConfigError("limits", tenant.id, f"{type(engine).__name__} cannot bound what a tenant holds")


@dataclass
class Bucket:
    """So much a minute, of which a minute's worth may be used at once. Only the event loop's thread touches it."""

    key: str
    """The limit's name."""
    rate: int | None
    """None: no limit."""
    clock: Callable[[], float] = time.monotonic
    level: float = field(init=False)
    """What may still be used; below zero where the last use was of more than what was left."""
    filled_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.level = float(self.rate or math.inf)
        self.filled_at = self.clock()

    def require(self) -> None:
        """Raises `LimitReached` while nothing is left."""
        self._refill()
        if self.rate is not None and self.level <= 0:
            error = LimitReached(self.key, self.rate, "are used up for now")
            error.retry_after = (1 - self.level) * MINUTE / self.rate
            raise error

    def use(self, count: int) -> None:
        """Counts what was used."""
        self._refill()
        self.level -= count

    def _refill(self) -> None:
        now = self.clock()
        if self.rate is not None:
            self.level = min(float(self.rate), self.level + (now - self.filled_at) * self.rate / MINUTE)
        self.filled_at = now


@dataclass
class Meter:
    """What one tenant has in flight and has used. Only the event loop's thread touches it."""

    limits: Limits
    clock: Callable[[], float] = time.monotonic
    in_flight: int = 0
    tokens: Bucket = field(init=False)
    hints: Bucket = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = Bucket("tokens_per_minute", self.limits.tokens_per_minute, self.clock)
        self.hints = Bucket("hints_per_minute", self.limits.hints_per_minute, self.clock)

    def admit(self, count: int) -> Ticket:
        """Room for `count` generations. Raises `LimitReached`, or `RequestError` for more than ever fit at once."""
        most = self.limits.requests_in_flight
        if count > most:
            raise RequestError("n", count, f"at most {most} generations at once are allowed")
        self.tokens.require()
        if self.in_flight + count > most:
            raise LimitReached("requests_in_flight", self.in_flight, f"at most {most} at once are allowed")
        self.in_flight += count
        return Ticket(self, count)


@dataclass(eq=False)
class Ticket:
    """Room that a call has been given."""

    meter: Meter
    count: int

    def give_back_one(self) -> None:
        """One generation has ended."""
        self.meter.in_flight -= 1
        self.count -= 1

    def release(self) -> None:
        """Gives back what is left. Idempotent."""
        self.meter.in_flight -= self.count
        self.count = 0
