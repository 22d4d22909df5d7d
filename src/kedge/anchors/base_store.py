"""Base KV that running workflows share: of placeholder values, and of templates' prefix segments."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from kedge.errors import ConfigError, PlanError
from kedge.kv.segment import KVSegment
from kedge.types import RunId, SampleId, TenantId, Tokens


class _SampleKey(NamedTuple):
    tenant: TenantId
    run: RunId
    sample: SampleId


class _ContentKey(NamedTuple):
    tenant: TenantId
    tokens: Tokens
    lead_in: Tokens


class _PrefixKey(NamedTuple):
    tenant: TenantId
    template: str


_Key = _SampleKey | _ContentKey | _PrefixKey


@dataclass(frozen=True, slots=True)
class BaseEntry:
    """Base KV of a placeholder's value."""

    key: tuple[int, int]
    """Unique for this base KV in this process"""
    tokens: Tokens
    kv: KVSegment
    exact_lineage: bool
    """False where the producer itself read translated KV"""


class TemplateBase(NamedTuple):
    """Base KV of a template's prefix segments, by segment index."""

    tenant: TenantId
    template: str
    serial: int
    """Another one whenever the KV is another"""
    parts: dict[int, KVSegment]


@dataclass(slots=True)
class _Stored:
    """Parts by segment index (a value has one, 0), and what a value is."""

    serial: int
    parts: dict[int, KVSegment]
    tokens: Tokens = ()
    exact_lineage: bool = True

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


@dataclass(frozen=True, slots=True)
class BaseStats:
    """What is stored now."""

    values: int
    templates: int
    nbytes: int


class BaseStore:
    """At most `max_bytes` of base KV; what was used longest ago goes first. One owner thread, no locks.

    Raises `ConfigError` where `max_bytes` is not positive.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes <= 0:
            raise ConfigError("anchors.max_base_bytes", max_bytes, "is too small")
        self._max_bytes, self._nbytes = max_bytes, 0
        self._entries: OrderedDict[_Key, _Stored] = OrderedDict()
        self._serials = count()

    def put_sample(
        self, tenant: TenantId, run: RunId, sample: SampleId, tokens: Tokens, kv: KVSegment, *, exact_lineage: bool
    ) -> None:
        """Keeps what a producer's decoding left behind. The KV may lack the last token(s), which nobody has run."""
        self._put(_SampleKey(tenant, run, sample), 0, kv, tokens, exact_lineage)

    def put_content(self, tenant: TenantId, tokens: Tokens, lead_in: Tokens, kv: KVSegment) -> None:
        """Keeps the result of a short prefill of `lead_in + tokens`, for every run that has the same value."""
        self._put(_ContentKey(tenant, tokens, lead_in), 0, kv, tokens, True)

    def put_prefix(self, tenant: TenantId, template: str, index: int, kv: KVSegment) -> None:
        """Keeps the base KV of the prefix segment that is number `index` of a template's segments."""
        self._put(_PrefixKey(tenant, template), index, kv, (), True)

    def find(self, tenant: TenantId, run: RunId, sample: SampleId, tokens: Tokens, lead_in: Tokens) -> BaseEntry | None:
        """Base KV of a value: its producer's, if that wrote these tokens (or more) in this run, or of equal content."""
        for key in (_SampleKey(tenant, run, sample), _ContentKey(tenant, tokens, lead_in)):
            stored = self._entries.get(key)
            if stored and stored.tokens[: len(tokens)] == tokens and stored.parts[0].tokens >= len(tokens):
                self._entries.move_to_end(key)
                return _entry(stored, tokens)
        return None

    def prefixes(self, tenant: TenantId, template: str) -> Mapping[int, KVSegment] | None:
        """Base KV of a template's prefix segments by segment index; None where nothing of it is known."""
        key = _PrefixKey(tenant, template)
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key].parts

    def templates(self) -> list[TemplateBase]:
        """All templates' base KV of prefix segments, least recently used first."""
        return [
            TemplateBase(*key, stored.serial, dict(stored.parts))
            for key, stored in self._entries.items()
            if isinstance(key, _PrefixKey)
        ]

    def end_run(self, tenant: TenantId, run: RunId) -> None:
        """Forgets the values that a run's agents produced."""
        self._forget(lambda key: isinstance(key, _SampleKey) and (key.tenant, key.run) == (tenant, run))

    def clear(self, tenant: TenantId | None = None) -> None:
        """Forgets the base KV of a tenant; of all tenants if None."""
        self._forget(lambda key: tenant is None or key.tenant == tenant)

    def nbytes(self) -> int:
        return self._nbytes

    def stats(self) -> BaseStats:
        templates = sum(isinstance(key, _PrefixKey) for key in self._entries)
        return BaseStats(len(self._entries) - templates, templates, self._nbytes)

    def check_integrity(self) -> None:
        """Raises `PlanError` where the sum of bytes is wrong or out of its bound."""
        real = sum(stored.nbytes for stored in self._entries.values())
        if real != self._nbytes or real > self._max_bytes:
            raise PlanError("nbytes", self._nbytes, f"{real} are stored, {self._max_bytes} allowed")

    def _put(self, key: _Key, index: int, kv: KVSegment, tokens: Tokens, exact_lineage: bool) -> None:
        parts = {index: kv.owned()}
        if isinstance(key, _PrefixKey) and key in self._entries:
            parts = self._entries[key].parts | parts
        self._drop(key)
        self._entries[key] = _Stored(next(self._serials), parts, tokens, exact_lineage)
        self._nbytes += self._entries[key].nbytes
        while self._nbytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def _forget(self, chosen: Callable[[_Key], bool]) -> None:
        for key in [key for key in self._entries if chosen(key)]:
            self._drop(key)

    def _drop(self, key: _Key) -> None:
        if stored := self._entries.pop(key, None):
            self._nbytes -= stored.nbytes


def _entry(stored: _Stored, tokens: Tokens) -> BaseEntry:
    return BaseEntry((stored.serial, len(tokens)), tokens, stored.parts[0].slice(0, len(tokens)), stored.exact_lineage)
