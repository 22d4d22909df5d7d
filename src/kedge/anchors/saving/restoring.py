"""The way back from records to anchor pools and base KV, one record at a time.

A record is checked in full before it becomes part of what is restored: whatever does not fit the model or itself is
damage of that record and of no other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kedge.anchors.anchor import Anchor, AnchorId
from kedge.anchors.base_store import BaseStore, ContentKey
from kedge.anchors.calibration import PARTS, Calibration
from kedge.anchors.estimators.site import Observation, SiteOffsets
from kedge.anchors.offsets import row_dtype
from kedge.anchors.pool import AnchorPool
from kedge.anchors.saving.records import POOL, TEMPLATE, VALUE, Record, name_of, pool_key
from kedge.anchors.store import AnchorStore
from kedge.errors import PlanError, StateDamaged, TranslationRefused
from kedge.kv.segment import KVSegment
from kedge.reuse.contracts import PlaceholderSite, PoolKey
from kedge.types import Namespace, Tokens

_NONSENSE = (
    ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError, PlanError, TranslationRefused
)  # fmt: skip
"""Errors that unpacking an invalid record can raise."""
_CALIBRATION = dict(zip(PARTS, (torch.float32, torch.float32, torch.int64, torch.float64), strict=True))


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
        anchors = self._unpacked_anchors(record)
        lengths = {anchor.id: anchor.length for anchor in anchors}
        sites = {}
        for number, data in enumerate(record.data["slots"]):
            _check_slot(data, lengths)
            tensors = {part: record.tensors[f"{number}.{part}"] for part in ("phi", "prefix")}
            offsets = self._offsets([AnchorId(one) for one in data["holders"]], lengths, tensors)
            offsets.calibration = _calibration(record, number, data["observations"])
            sites[PlaceholderSite(data["agent_key"], data["index"])] = offsets
        pool = self._anchors.empty_pool()
        pool.adopt(anchors, sites)
        pool.check_integrity()
        return pool

    def _unpacked_anchors(self, record: Record) -> list[Anchor]:
        ids, hits, lengths = zip(*record.data["anchors"], strict=True)
        _check_counts("anchors", [*ids, *hits, *lengths])
        _expect(len(set(ids)) == len(ids) and min(lengths) > 0, "anchors", ids, "are not distinct, or of no tokens")
        tokens, keys = record.tensors["tokens"], record.tensors["keys"]
        _check_tokens(tokens)
        width = self._anchors.key_width(self._like)
        fits = keys.dtype == torch.float32 and keys.shape == (len(tokens), width)
        _expect(fits, "keys", (tuple(keys.shape), keys.dtype), f"are not {len(tokens)} float32 vectors of {width}")
        parts = zip(ids, hits, tokens.split(lengths), keys.to(self._like.device).split(lengths), strict=True)
        return [Anchor(AnchorId(one), tuple(ts.tolist()), ks, hit) for one, hit, ts, ks in parts]

    def _offsets(
        self, holders: Sequence[AnchorId], lengths: Mapping[AnchorId, int], tensors: Mapping[str, Tensor]
    ) -> SiteOffsets:
        for part, rows in tensors.items():
            _expect(rows.dtype == row_dtype(self._like), part, rows.dtype, f"are not {row_dtype(self._like)}")
        value, prefix = (tensors[part].to(self._like.device) for part in ("phi", "prefix"))
        prefix_tokens = len(prefix) // len(holders)
        offsets = SiteOffsets(self._like, prefix_tokens, self._anchors.offset_bits)
        values = value.split([lengths[holder] for holder in holders])
        prefixes = prefix.split([prefix_tokens] * len(holders))
        for holder, of_value, of_prefix in zip(holders, values, prefixes, strict=True):
            offsets.put(holder, Observation(of_value, of_prefix, of_value[:0], of_prefix[:0]))
        return offsets


def _tokens(record: Record, name: str) -> Tokens:
    tokens = record.tensors[name]
    _check_tokens(tokens)
    return tuple(tokens.tolist())


def _check_tokens(tokens: Tensor) -> None:
    is_sound = tokens.ndim == 1 and tokens.dtype == torch.int64 and bool((tokens >= 0).all())
    _expect(is_sound, "tokens", tokens.dtype, "are no token ids")


def _calibration(record: Record, number: int, observations: int) -> Calibration:
    tensors = {part: record.tensors[f"{number}.calibration.{part}"] for part in PARTS}
    for part, tensor in tensors.items():
        _expect(tensor.dtype == _CALIBRATION[part], part, tensor.dtype, f"is not {_CALIBRATION[part]}")
    return Calibration.restored(tensors, observations)


def _check_slot(data: Mapping[str, Any], known: Mapping[AnchorId, int]) -> None:
    holders = data["holders"]
    _check_counts("site", [data["index"], data["observations"], *holders])
    _expect(isinstance(data["agent_key"], str), "agent_key", data["agent_key"], "is no text")
    sound = holders and len(set(holders)) == len(holders) and known.keys() >= set(holders)
    _expect(bool(sound), "holders", holders, "are not some of the pool's anchors, each once")


def _check_counts(key: str, numbers: Sequence[object]) -> None:
    wrong = [one for one in numbers if type(one) is not int or one < 0]
    _expect(not wrong, key, wrong[:3], "are no natural numbers")


def _expect(holds: bool, key: str, value: object, why: str) -> None:
    if not holds:
        raise PlanError(key, value, why)
