"""What outlives a process: anchor pools and the base KV of prefix segments, as records of tensors and plain data.

A view is taken by the stores' owner thread and costs next to nothing; its record is made by any thread, while the owner
goes on. Keys are unrotated, here as everywhere, so that what is saved has no position. Base KV of values is not saved:
it is made again when a value comes for the first time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kedge.anchors.anchor import Anchor, AnchorId
from kedge.anchors.base_store import BaseStore, TemplateBase
from kedge.anchors.calibration import PARTS, Calibration
from kedge.anchors.offsets import OffsetTable
from kedge.anchors.pool import AnchorPool
from kedge.anchors.slot import Observation, SlotOffsets
from kedge.anchors.store import AnchorStore
from kedge.errors import PlanError, StateRefused
from kedge.kv.segment import KVSegment
from kedge.runtime.interfaces import PoolKey, Slot
from kedge.types import TenantId, WorkflowId

POOL, TEMPLATE = "pool", "template"


@dataclass(frozen=True, slots=True)
class Record:
    """One pool, or one template's prefix segments, as it is written."""

    name: tuple[str, ...]
    """Its kind, its tenant, and what it is called in that tenant"""
    data: Mapping[str, Any]
    """JSON"""
    tensors: Mapping[str, Tensor]


# views: the owner's thread --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a table that are not copied yet."""

    table: OffsetTable
    arena: Tensor
    rows: Tensor
    version: int

    @classmethod
    def of(cls, table: OffsetTable, anchors: Sequence[AnchorId]) -> _Rows:
        return cls(table, table.arena, table.rows_of_anchors(anchors), table.version)

    def copied(self) -> Tensor | None:
        """[rows, width] on the CPU; None where rows have moved or been freed in the meantime.

        A table writes to rows that nobody has. Before it writes to those that somebody had, its version has changed.
        """
        rows = self.table.decode(self.arena[self.rows]).cpu()
        return rows if self.table.version == self.version else None


@dataclass(frozen=True, slots=True)
class _SlotView:
    slot: Slot
    holders: tuple[AnchorId, ...]
    calibration: Calibration
    phi: _Rows
    prefix: _Rows

    @classmethod
    def of(cls, slot: Slot, offsets: SlotOffsets) -> _SlotView:
        ids = tuple(offsets.holders)
        return cls(slot, ids, offsets.calibration, _Rows.of(offsets.phi, ids), _Rows.of(offsets.prefix, ids))

    def tensors(self) -> dict[str, Tensor] | None:
        phi, prefix = self.phi.copied(), self.prefix.copied()
        if phi is None or prefix is None:
            return None
        calibration = {f"calibration.{part}": tensor for part, tensor in self.calibration.tensors.items()}
        return {"phi": phi, "prefix": prefix, **calibration}

    def data(self) -> dict[str, Any]:
        return {
            "agent_key": self.slot.agent_key,
            "index": self.slot.index,
            "holders": self.holders,
            "observations": self.calibration.observations,
        }


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool as it is now."""

    key: PoolKey
    anchors: tuple[Anchor, ...]
    slots: tuple[_SlotView, ...]

    @classmethod
    def of(cls, key: PoolKey, pool: AnchorPool) -> PoolView:
        kept = ((slot, offsets) for slot, offsets in pool.slots.items() if offsets.holders and offsets.is_saved)
        slots = tuple(_SlotView.of(slot, offsets) for slot, offsets in kept)
        return cls(key, tuple(pool.anchors.values()), slots)

    @property
    def name(self) -> tuple[str, ...]:
        return POOL, *self.key

    @property
    def signature(self) -> Hashable:
        """Equal for two views of one store between which nothing was learned or dropped. Hits do not count."""
        return tuple((view.slot, view.holders, view.calibration.observations) for view in self.slots)

    def record(self) -> Record | None:
        """None where the pool has changed so much that another view is needed."""
        tensors = {
            "tokens": torch.tensor([token for anchor in self.anchors for token in anchor.tokens]),
            "keys": torch.cat([anchor.keys for anchor in self.anchors]).cpu(),
        }
        for number, view in enumerate(self.slots):
            parts = view.tensors()
            if parts is None:
                return None
            tensors |= {f"{number}.{part}": tensor for part, tensor in parts.items()}
        anchors = [(anchor.id, anchor.hits, anchor.length) for anchor in self.anchors]
        return Record(self.name, {"anchors": anchors, "slots": [view.data() for view in self.slots]}, tensors)


@dataclass(frozen=True, slots=True)
class TemplateView:
    """The base KV of a template's prefix segments, which nobody ever writes to again."""

    base: TemplateBase

    @property
    def name(self) -> tuple[str, ...]:
        return TEMPLATE, self.base.tenant, self.base.template

    @property
    def signature(self) -> Hashable:
        return self.base.serial

    def record(self) -> Record:
        tensors: dict[str, Tensor] = {}
        for index, kv in self.base.parts.items():
            tensors |= {f"{index}.keys": kv.keys.cpu(), f"{index}.values": kv.values.cpu()}
        return Record(self.name, {"segments": sorted(self.base.parts)}, tensors)


def names(anchors: AnchorStore, bases: BaseStore) -> list[tuple[str, ...]]:
    """Of everything that can be saved now, least recently used first."""
    templates = [(TEMPLATE, base.tenant, base.template) for base in bases.templates()]
    return templates + [(POOL, *key) for key, pool in anchors.pools.items() if pool.anchors]


def view(anchors: AnchorStore, bases: BaseStore, name: tuple[str, ...]) -> PoolView | TemplateView | None:
    """What has this name now; None where nothing has it any more."""
    if name[0] == TEMPLATE:
        found = (base for base in bases.templates() if (base.tenant, base.template) == name[1:])
        return next(map(TemplateView, found), None)
    key = _pool_key(name)
    pool = anchors.pools.get(key)
    return PoolView.of(key, pool) if pool and pool.anchors else None


# the way back ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Restored:
    """What records held, rebuilt and not yet part of any store."""

    pools: Mapping[PoolKey, AnchorPool]
    templates: Sequence[tuple[TenantId, str, Mapping[int, KVSegment]]]

    def install(self, anchors: AnchorStore, bases: BaseStore) -> None:
        """Puts it in the place of everything that was learned. In the owner's thread."""
        bases.clear()
        for tenant, template, parts in self.templates:
            for index, kv in parts.items():
                bases.put_prefix(tenant, template, index, kv)
        anchors.adopt(self.pools)


def restored(records: Iterable[Record], anchors: AnchorStore, like: KVSegment) -> Restored:
    """Rebuilds what records hold, in the bounds of `anchors` (which stays as it is). `like` is KV, perhaps of no
    tokens, of the model's shape, dtype and device.

    Raises `StateRefused` for a record that makes no sense.
    """
    pools: dict[PoolKey, AnchorPool] = {}
    templates = []
    for record in records:
        try:
            if record.name[0] == TEMPLATE:
                _, tenant, template = record.name
                templates.append((TenantId(tenant), template, _parts(record, like)))
            else:
                pools[_pool_key(record.name)] = _pool(record, anchors.empty_pool(), like, anchors.offset_bits)
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError, PlanError) as error:
            raise StateRefused("record", record.name, f"makes no sense: {error!r}") from error
    return Restored(pools, templates)


def _pool_key(name: tuple[str, ...]) -> PoolKey:
    _, tenant, workflow, placeholder = name
    return PoolKey(TenantId(tenant), WorkflowId(workflow), placeholder)


def _parts(record: Record, like: KVSegment) -> dict[int, KVSegment]:
    parts = {}
    for index in record.data["segments"]:
        kv = KVSegment(*(record.tensors[f"{index}.{half}"].to(like.device) for half in ("keys", "values")))
        if kv.slice(0, 0).keys.shape != like.slice(0, 0).keys.shape or kv.dtype != like.dtype:
            raise PlanError("kv", tuple(kv.keys.shape), "is not of the model's shape")
        parts[int(index)] = kv
    return parts


def _pool(record: Record, pool: AnchorPool, like: KVSegment, bits: int) -> AnchorPool:
    ids, hits, lengths = zip(*record.data["anchors"], strict=True)
    tokens, keys = (record.tensors[part].split(lengths) for part in ("tokens", "keys"))
    anchors = [
        Anchor(AnchorId(i), tuple(ts.tolist()), ks.to(like.device), h)
        for i, h, ts, ks in zip(ids, hits, tokens, keys, strict=True)
    ]
    slots = {}
    for number, data in enumerate(record.data["slots"]):
        parts = {part: record.tensors[f"{number}.{part}"].to(like.device) for part in ("phi", "prefix")}
        known = {part: record.tensors[f"{number}.calibration.{part}"] for part in PARTS}
        calibration = Calibration.restored(known, data["observations"])
        slots[Slot(data["agent_key"], data["index"])] = _offsets(
            [AnchorId(i) for i in data["holders"]], dict(zip(ids, lengths, strict=True)), parts, calibration, like, bits
        )
    pool.adopt(anchors, slots)
    pool.check_integrity()
    return pool


def _offsets(
    holders: Sequence[AnchorId],
    lengths: Mapping[AnchorId, int],
    parts: Mapping[str, Tensor],
    calibration: Calibration,
    like: KVSegment,
    bits: int,
) -> SlotOffsets:
    prefix_tokens = len(parts["prefix"]) // len(holders)
    offsets = SlotOffsets(like, prefix_tokens, bits)
    offsets.calibration = calibration
    phis = parts["phi"].split([lengths[holder] for holder in holders])
    prefixes = parts["prefix"].split([prefix_tokens] * len(holders))
    for holder, phi, prefix in zip(holders, phis, prefixes, strict=True):
        offsets.put(holder, Observation(phi, prefix, phi[:0], prefix[:0]))
    return offsets
