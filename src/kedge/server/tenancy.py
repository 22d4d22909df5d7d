"""API keys, the tenants that they belong to, and what each tenant has and may use.

A tenant is what the server authenticated, never what a client claims. Without keys there is one tenant.
`docs/server.md` has the file of keys.
"""

import hashlib
import hmac
import math
import re
import secrets
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field

from kedge.errors import ConfigError, LimitReached, NotFound, Unauthenticated
from kedge.server.client_runs import Registered
from kedge.settings import LimitSettings, QuotaSettings, SettingsSection
from kedge.types import Namespace, TenantId

OPERATOR, NAMES = "*", "must have 1 to 64 letters, digits, '_', '.' and '-'"
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}|\*")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
T = TypeVar("T")


@dataclass
class Bucket:
    """Token bucket: `rate` per minute, of which a minute's worth may be used at once."""

    key: str
    """Name of the limit."""
    rate: int | None
    """None for no limit."""
    clock: Callable[[], float] = time.monotonic
    full_at: float = -math.inf
    """When all that was used is there again."""

    def require(self) -> None:
        """Raise `LimitReached` while nothing is left."""
        if self.rate is not None and (wait := self.full_at - self.clock() - 60) >= 0:
            error = LimitReached(self.key, self.rate, "are used up for now")
            error.retry_after = wait + 60 / self.rate
            raise error

    def use(self, count: int) -> None:
        """Take `count` out of the bucket, also where less is left."""
        if self.rate is not None:
            self.full_at = max(self.full_at, self.clock()) + count * 60 / self.rate


@dataclass(eq=False)
class Tenant:
    """Authenticated caller: its limits, what it uses of them, and what it has on one server. Once the server runs,
    only the event loop uses it; but whoever holds the lock of `History` takes tokens.
    """

    id: TenantId
    limits: LimitSettings
    is_operator: bool = False
    keep_texts: bool | None = None
    """Whether the dashboard may keep its prompts and answers; None: as the server's setting says."""
    clock: Callable[[], float] = time.monotonic
    in_flight: int = 0
    """Generations and runs that go on"""
    body_bytes: int = 0
    """Of bodies that are being read or parsed"""
    workflows: dict[str, Registered] = field(default_factory=dict)
    """By name, in the order in which they came, like its runs"""
    runs: dict[str, Any] = field(default_factory=dict)
    """Those that the server drives, by their ids: all that go on, and the last ended ones"""
    followed: list[Any] = field(default_factory=list)
    """The run of each stream of events: at most as many as requests in flight"""

    def __post_init__(self) -> None:
        self.allowed_tokens = Bucket("tokens_per_minute", self.limits.tokens_per_minute, self.clock)
        self.allowed_hints = Bucket("hints_per_minute", self.limits.hints_per_minute, self.clock)

    def admit(self, count: int) -> None:
        """Reserve room for `count` generations. Raises `LimitReached`."""
        most = self.limits.requests_in_flight
        self.allowed_tokens.require()
        if self.in_flight + count > most:
            raise LimitReached("requests_in_flight", self.in_flight, f"at most {most} at once are allowed")
        self.in_flight += count

    def give_back(self, count: int = 1) -> None:
        """Free the room of so many generations."""
        self.in_flight -= count

    def receive(self, count: int, body_bytes: int) -> None:
        """Count bytes of a body that has come, where each may have `body_bytes`. Raises `LimitReached`."""
        if self.body_bytes > (most := self.limits.requests_in_flight * body_bytes):
            raise LimitReached("body", self.body_bytes, f"at most {most} bytes at once are read")
        self.body_bytes += count

    @property
    def quota(self) -> QuotaSettings:
        """The limits that the engine enforces."""
        return QuotaSettings(anchor_bytes=self.limits.anchor_bytes, host_memory=self.limits.host_memory)

    def namespace(self, salt: str) -> Namespace:
        """Return the namespace of calls with this salt: each salt has a partition of the tenant's data."""
        return Namespace(self.id, _digest(salt)[:32] if salt else "")


def found(kind: str, known: Mapping[str, T], name: str) -> T:
    """Return what a tenant has by this name. Raises `NotFound`."""
    if name not in known:
        raise NotFound(kind, name, f"the tenant has no such {kind}")
    return known[name]


def new_key() -> str:
    """Return a key with 256 random bits: enough for one round of SHA-256 to be a safe hash of it."""
    return f"sk-kedge-{secrets.token_urlsafe(32)}"


def hashed(key: str) -> str:
    """Return the hash of a key, as files and variables contain it."""
    return f"sha256:{_digest(key)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


class KeyRing:
    """Hashes of API keys with their tenants, for one server."""

    def __init__(self, tenants: Mapping[str, Tenant], default: LimitSettings) -> None:
        """`tenants` is by hash, see `hashed`. Without any, every caller is the tenant `default`, with its limits."""
        self._tenants = {digest.encode(): tenant for digest, tenant in tenants.items()}
        self._everyone = Tenant(TenantId("default"), default, is_operator=True)

    @property
    def tenants(self) -> list[Tenant]:
        """All tenants that may generate, each once."""
        known = dict.fromkeys(self._tenants.values())
        return [self._everyone] if self.is_open else [tenant for tenant in known if tenant.id != OPERATOR]

    @property
    def is_open(self) -> bool:
        """Whether callers need no key."""
        return not self._tenants

    def of_headers(self, headers: Mapping[str, str]) -> Tenant:
        """Return the tenant whose key is in a call's headers. Raises `Unauthenticated`.

        The key is compared with all known ones, each in constant time.
        """
        if self.is_open:
            return self._everyone
        scheme, _, key = (headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}").partition(" ")
        presented = hashed(key.strip()).encode() if scheme.lower() == "bearer" else b""
        found = [tenant for known, tenant in self._tenants.items() if hmac.compare_digest(known, presented)]
        if not found:
            raise Unauthenticated("Authorization", "…", "send a known API key as `Bearer KEY`, or in `x-api-key`")
        return found[0]


def read_hash(value: object) -> str:
    """Return a hash as it stands. Raises `ValueError` for anything else."""
    if not isinstance(value, str) or not _HASH.fullmatch(value):
        raise ValueError("must be `sha256:` and 64 hex digits; `kedge serve --new-key` makes one")
    return value


class TenantSection(LimitSettings):
    """A tenant in the file of keys."""

    section = ""
    keys: Annotated[tuple[Annotated[str, BeforeValidator(read_hash)], ...], Field(min_length=1)]
    keep_texts: bool | None = None


class KeyFile(SettingsSection):
    """The file of keys."""

    section = ""
    tenants: dict[str, dict[str, Any]] = {}
    operator: dict[str, Any] | None = None


def load_keys(file: Path | None, variable: str | None, default: LimitSettings) -> KeyRing:
    """Return the keys of a file and of `KEDGE_API_KEYS`. Raises `ConfigError`, which never contains a key."""
    try:
        found = KeyFile(**tomllib.loads(file.read_text(encoding="utf-8")) if file else {})
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("--api-keys", str(file), str(error)) from None
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.key}", "…", error.why) from None
    given = [(f"{file}: tenants.{name}", name, section) for name, section in found.tenants.items()]
    if found.operator is not None:
        given.append((f"{file}: operator", OPERATOR, found.operator))
    for entry in filter(None, re.split(r"[,\s]+", variable or "")):
        name, _, digest = entry.partition(":")
        given.append((f"KEDGE_API_KEYS: {name}", name, {"keys": [digest]}))
    by_name, by_hash = dict[str, Tenant](), dict[str, Tenant]()
    for key, name, section in given:
        try:
            own = TenantSection(**{**dict(default), **section})
        except ConfigError as error:
            shown = error.value if error.key in LimitSettings.model_fields else "…"
            raise ConfigError(f"{key}.{error.key}", shown, error.why) from None
        if not NAME.fullmatch(name):
            raise ConfigError("tenant", name, NAMES)
        limits = LimitSettings(**own.model_dump(include=set(LimitSettings.model_fields)))
        tenant = by_name.setdefault(name, Tenant(TenantId(name), limits, name == OPERATOR, own.keep_texts))
        for digest in own.keys:
            if digest in by_hash:
                raise ConfigError("api key", name, "duplicate of another key")
            by_hash[digest] = tenant
    if file and not by_hash:
        raise ConfigError("--api-keys", str(file), "has no keys: without any, everyone may call")
    return KeyRing(by_hash, default)
