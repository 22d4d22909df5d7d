"""What outlives a process: anchor pools and base KV as records of tensors and plain data, and the way back.

A view is taken by the stores' owner thread at almost no cost; any thread makes its record, while the owner goes on.
Keys are unrotated, so that saved KV has no position. Base KV of values is saved where that is asked for; otherwise it
is computed again when a value first comes up.

A record is checked in full before it becomes part of what is restored: whatever does not fit the model or itself is
damage of that record and of no other.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kedge.anchors.anchor import Anchor, AnchorId, PlaceholderSite, PoolKey
from kedge.anchors.base_store import BaseStore, ContentKey, LastingKey, PrefixKey
from kedge.anchors.calibration import PARTS, Calibration
from kedge.anchors.offsets import OffsetTable, row_dtype
from kedge.anchors.pool import AnchorPool
from kedge.anchors.sites import Observation, SiteOffsets
from kedge.anchors.store import AnchorStore
from kedge.errors import PlanError, StateDamaged, TranslationRefused
from kedge.kv.segment import KVSegment
from kedge.types import Namespace, Tokens, WorkflowId

POOL, TEMPLATE, VALUE = "pool", "template", "value"
Key = PoolKey | LastingKey
Name = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """The saved form of one pool, of one template's prefix segments, or of one value's base KV."""

    name: Name
    """Its kind, its namespace as text, and its name in that namespace."""
    data: Mapping[str, Any]
    """JSON"""
    tensors: Mapping[str, Tensor]


# views: the owner's thread --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a table, not copied yet."""

    table: OffsetTable
    arena: Tensor
    rows: Tensor
    version: int

    @classmethod
    def of(cls, table: OffsetTable, anchors: Sequence[AnchorId]) -> _Rows:
        return cls(table, table.arena, table.rows_of_anchors(anchors), table.version)

    def copied(self) -> Tensor | None:
        """Return the rows [rows, width] on the CPU; None if they have moved or been freed in the meantime.

        A table writes to free rows only, and changes its version before it writes to rows that were in use.
        """
        rows = self.arena[self.rows].cpu()
        return rows if self.table.version == self.version else None


@dataclass(frozen=True, slots=True)
class _SiteView:
    site: PlaceholderSite
    holders: tuple[AnchorId, ...]
    calibration: Calibration
    value: _Rows
    prefix: _Rows

    @classmethod
    def of(cls, site: PlaceholderSite, offsets: SiteOffsets) -> _SiteView:
        ids = tuple(offsets.holders)
        return cls(site, ids, offsets.calibration, _Rows.of(offsets.value, ids), _Rows.of(offsets.prefix, ids))

    def tensors(self) -> dict[str, Tensor] | None:
        value, prefix = self.value.copied(), self.prefix.copied()
        if value is None or prefix is None:
            return None
        calibration = {f"calibration.{part}": tensor for part, tensor in self.calibration.tensors.items()}
        return {"phi": value, "prefix": prefix, **calibration}

    def data(self) -> dict[str, Any]:
        return {
            "agent_key": self.site.agent_key,
            "index": self.site.index,
            "holders": self.holders,
            "observations": self.calibration.observations,
        }


@dataclass(frozen=True, slots=True)
class StateView:
    """What has a key as it is now."""

    key: Key
    signature: Hashable
    """Equal for two views of one store if nothing was learned or dropped between them. Hits do not count."""
    record: Callable[[], Record | None]
    """Returns the record; None if a pool has changed so much that a new view is needed."""


def _pool_record(key: PoolKey, anchors: Sequence[Anchor], sites: Sequence[_SiteView]) -> Record | None:
    tensors = {
        "tokens": torch.tensor([token for anchor in anchors for token in anchor.tokens]),
        "keys": torch.cat([anchor.keys for anchor in anchors]).cpu(),
    }
    for number, site in enumerate(sites):
        parts = site.tensors()
        if parts is None:
            return None
        tensors |= {f"{number}.{part}": tensor for part, tensor in parts.items()}
    held = [(anchor.id, anchor.hits, anchor.length) for anchor in anchors]
    return Record(name_of(key), {"anchors": held, "slots": [site.data() for site in sites]}, tensors)


def _template_record(key: PrefixKey, parts: Mapping[int, KVSegment]) -> Record:
    tensors: dict[str, Tensor] = {}
    for index, kv in parts.items():
        tensors |= {f"{index}.keys": kv.keys.cpu(), f"{index}.values": kv.values.cpu()}
    return Record(name_of(key), {"segments": sorted(parts)}, tensors)


def _value_record(key: ContentKey, kv: KVSegment) -> Record:
    tokens, context = (torch.tensor(part, dtype=torch.int64) for part in (key.tokens, key.base_context))
    tensors = {"tokens": tokens, "context": context, "keys": kv.keys.cpu(), "values": kv.values.cpu()}
    return Record(name_of(key), {}, tensors)


def keys(anchors: AnchorStore, bases: BaseStore, *, values: bool = False) -> list[Key]:
    """Return the keys of everything that can be saved now, least recently used first; base KV of values if `values`."""
    return [*bases.lasting(values=values), *(key for key, pool in anchors.pools.items() if pool.anchors)]


def view(anchors: AnchorStore, bases: BaseStore, key: Key) -> StateView | None:
    """Return a view of what has this key now; None if it has gone."""
    if isinstance(key, PoolKey):
        pool = anchors.pools.get(key)
        if pool is None or not pool.anchors:
            return None
        kept = ((site, offsets) for site, offsets in pool.sites.items() if offsets.holders)
        sites = tuple(_SiteView.of(site, offsets) for site, offsets in kept)
        learned = tuple((one.site, one.holders, one.calibration.observations) for one in sites)
        return StateView(key, learned, partial(_pool_record, key, tuple(pool.anchors.values()), sites))
    base = bases.lasting_base(key)
    if base is None:
        return None
    if isinstance(key, PrefixKey):
        return StateView(key, base.serial, partial(_template_record, key, base.parts))
    return StateView(key, base.serial, partial(_value_record, key, base.parts[0]))


def name_of(key: Key) -> Name:
    """Return the name that what has this key is saved under. Any thread may call. O(tokens of a value)."""
    if isinstance(key, PoolKey):
        return POOL, str(key.namespace), key.workflow, key.placeholder
    if isinstance(key, PrefixKey):
        return TEMPLATE, str(key.namespace), key.template
    numbers = array("q", (len(key.base_context), *key.base_context, *key.tokens))
    return VALUE, str(key.namespace), hashlib.blake2b(numbers.tobytes(), digest_size=20).hexdigest()


def pool_key(name: Name) -> PoolKey:
    """Return the key of the pool that is saved under this name."""
    _, namespace, workflow, placeholder = name
    return PoolKey(Namespace.parse(namespace), WorkflowId(workflow), placeholder)


_NONSENSE = (
    ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError, PlanError, TranslationRefused
)  # fmt: skip
"""Errors that unpacking an invalid record can raise."""
_DTYPES = torch.float32, torch.float32, torch.int64, torch.float64
_CALIBRATION = {f"calibration.{part}": dtype for part, dtype in zip(PARTS, _DTYPES, strict=True)}


class Restored:
    """The content of records, rebuilt in the order in which they were added, and not yet part of any store."""

    def __init__(self, anchors: AnchorStore, like: KVSegment) -> None:
        """Restore within the bounds of `anchors`, which stays unchanged. `like` is KV, perhaps of no tokens, of the
        model's shape, dtype and device.
        """
        self._anchors, self._like = anchors, like
        self._pools: dict[PoolKey, AnchorPool] = {}
        self._bases: list[Callable[[BaseStore], None]] = []
        """Each puts one record's base KV into a store"""

    def add(self, record: Record) -> None:
        """Rebuild one record. Raises `StateDamaged` for an invalid one, and adds nothing then."""
        try:
            if record.name[0] == TEMPLATE:
                self._bases.append(self._template(record))
            elif record.name[0] == VALUE:
                self._bases.append(self._value(record))
            else:
                _expect(record.name[0] == POOL, "name", record.name, f"is none of {POOL}, {TEMPLATE} and {VALUE}")
                self._pools[pool_key(record.name)] = self._pool(record)
        except _NONSENSE as error:
            raise StateDamaged("record", record.name, f"makes no sense: {error!r}") from error

    def install(self, anchors: AnchorStore, bases: BaseStore) -> None:
        """Replace everything learned by the restored content. Called by the owner's thread."""
        bases.clear()
        for put in self._bases:
            put(bases)
        anchors.adopt(self._pools)

    def _template(self, record: Record) -> Callable[[BaseStore], None]:
        _, namespace, template = record.name
        _check_counts("segments", record.data["segments"])
        parts = {index: self._kv(record, f"{index}.") for index in record.data["segments"]}

        def put(bases: BaseStore) -> None:
            for index, kv in parts.items():
                bases.put_prefix(Namespace.parse(namespace), template, index, kv)

        return put

    def _value(self, record: Record) -> Callable[[BaseStore], None]:
        _, namespace, _ = record.name
        kv, tokens, context = self._kv(record), _tokens(record, "tokens"), _tokens(record, "context")
        key = ContentKey(Namespace.parse(namespace), tokens, context)
        _expect(name_of(key) == record.name and len(tokens) == kv.tokens, "tokens", len(tokens), "are of another value")
        return lambda bases: bases.put_content(*key, kv)

    def _kv(self, record: Record, part: str = "") -> KVSegment:
        kv = KVSegment(*(record.tensors[f"{part}{half}"].to(self._like.device) for half in ("keys", "values")))
        fits = kv.slice(0, 0).keys.shape == self._like.slice(0, 0).keys.shape and kv.dtype == self._like.dtype
        _expect(fits, "kv", (tuple(kv.keys.shape), kv.dtype), "is not of the model's shape and dtype")
        return kv

    def _pool(self, record: Record) -> AnchorPool:
        ids, hits, lengths = zip(*record.data["anchors"], strict=True)
        _check_counts("anchors", [*ids, *hits, *lengths])
        _expect(len(set(ids)) == len(ids) and min(lengths) > 0, "anchors", ids, "are not distinct, or of no tokens")
        tokens, keys = record.tensors["tokens"], record.tensors["keys"]
        _check_tokens(tokens)
        width = self._anchors.reader.width(self._like)
        fits = keys.dtype == torch.float32 and keys.shape == (len(tokens), width)
        _expect(fits, "keys", (tuple(keys.shape), keys.dtype), f"are not {len(tokens)} float32 vectors of {width}")
        parts = zip(ids, hits, tokens.split(lengths), keys.to(self._like.device).split(lengths), strict=True)
        anchors = [Anchor(AnchorId(one), tuple(ts.tolist()), ks, hit) for one, hit, ts, ks in parts]
        of_ids = dict(zip(ids, lengths, strict=True))
        sites = dict(self._site(record, number, data, of_ids) for number, data in enumerate(record.data["slots"]))
        pool = self._anchors.empty_pool()
        pool.adopt(anchors, sites)
        pool.check_integrity()
        return pool

    def _site(
        self, record: Record, number: int, data: Mapping[str, Any], lengths: Mapping[int, int]
    ) -> tuple[PlaceholderSite, SiteOffsets]:
        holders = data["holders"]
        _check_counts("site", [data["index"], data["observations"], *holders])
        _expect(isinstance(data["agent_key"], str), "agent_key", data["agent_key"], "is no text")
        sound = holders and len(set(holders)) == len(holders) and lengths.keys() >= set(holders)
        _expect(bool(sound), "holders", holders, "are not some of the pool's anchors, each once")
        dtypes = {"phi": row_dtype(self._like), "prefix": row_dtype(self._like), **_CALIBRATION}
        tensors = {part: record.tensors[f"{number}.{part}"] for part in dtypes}
        for part, tensor in tensors.items():
            _expect(tensor.dtype == dtypes[part], part, tensor.dtype, f"is not {dtypes[part]}")
        value, prefix = (tensors[part].to(self._like.device) for part in ("phi", "prefix"))
        prefix_tokens = len(prefix) // len(holders)
        offsets = SiteOffsets(self._like, prefix_tokens)
        values = value.split([lengths[holder] for holder in holders])
        prefixes = prefix.split([prefix_tokens] * len(holders))
        for holder, of_value, of_prefix in zip(holders, values, prefixes, strict=True):
            offsets.put(AnchorId(holder), Observation(of_value, of_prefix, of_value[:0], of_prefix[:0]))
        learned = {part: tensors[f"calibration.{part}"] for part in PARTS}
        offsets.calibration = Calibration.restored(learned, data["observations"])
        return PlaceholderSite(data["agent_key"], data["index"]), offsets


def _tokens(record: Record, name: str) -> Tokens:
    tokens = record.tensors[name]
    _check_tokens(tokens)
    return tuple(tokens.tolist())


def _check_tokens(tokens: Tensor) -> None:
    is_sound = tokens.ndim == 1 and tokens.dtype == torch.int64 and bool((tokens >= 0).all())
    _expect(is_sound, "tokens", tokens.dtype, "are no token ids")


def _check_counts(key: str, numbers: Sequence[object]) -> None:
    wrong = [one for one in numbers if type(one) is not int or one < 0]
    _expect(not wrong, key, wrong[:3], "are no natural numbers")


def _expect(holds: bool, key: str, value: object, why: str) -> None:
    if not holds:
        raise PlanError(key, value, why)
