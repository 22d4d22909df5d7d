"""Records of what outlives a process: anchor pools and base KV, as tensors and plain data.

A view is taken by the stores' owner thread at almost no cost; any thread makes its record, while the owner goes on.
Keys are unrotated, so that saved KV has no position. Base KV of values is saved where that is asked for; otherwise it
is computed again when a value first comes up. `kedge.anchors.saving.restoring` reads records back.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kedge.anchors.anchor import Anchor, AnchorId
from kedge.anchors.base_store import BaseStore, ContentBase, LastingKey, PrefixKey, TemplateBase
from kedge.anchors.calibration import Calibration
from kedge.anchors.estimators.site import SiteOffsets
from kedge.anchors.offsets import OffsetTable
from kedge.anchors.pool import AnchorPool
from kedge.anchors.store import AnchorStore
from kedge.reuse.contracts import PlaceholderSite, PoolKey
from kedge.types import Namespace, WorkflowId

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
        rows = self.table.decode(self.arena[self.rows]).cpu()
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
class PoolView:
    """A snapshot of a pool."""

    key: PoolKey
    anchors: tuple[Anchor, ...]
    sites: tuple[_SiteView, ...]

    @classmethod
    def of(cls, key: PoolKey, pool: AnchorPool) -> PoolView:
        kept = ((site, offsets) for site, offsets in pool.sites.items() if offsets.holders and offsets.is_saved)
        sites = tuple(_SiteView.of(site, offsets) for site, offsets in kept)
        return cls(key, tuple(pool.anchors.values()), sites)

    @property
    def name(self) -> Name:
        return name_of(self.key)

    @property
    def signature(self) -> Hashable:
        """Return a value that is equal for two views of one store if nothing was learned or dropped between them. Hits
        do not count.
        """
        return tuple((view.site, view.holders, view.calibration.observations) for view in self.sites)

    def record(self) -> Record | None:
        """Return the record; None if the pool has changed so much that a new view is needed."""
        tensors = {
            "tokens": torch.tensor([token for anchor in self.anchors for token in anchor.tokens]),
            "keys": torch.cat([anchor.keys for anchor in self.anchors]).cpu(),
        }
        for number, view in enumerate(self.sites):
            parts = view.tensors()
            if parts is None:
                return None
            tensors |= {f"{number}.{part}": tensor for part, tensor in parts.items()}
        anchors = [(anchor.id, anchor.hits, anchor.length) for anchor in self.anchors]
        return Record(self.name, {"anchors": anchors, "slots": [view.data() for view in self.sites]}, tensors)


@dataclass(frozen=True, slots=True)
class TemplateView:
    """A view of the immutable base KV of a template's prefix segments."""

    base: TemplateBase

    @property
    def name(self) -> Name:
        return name_of(PrefixKey(self.base.namespace, self.base.template))

    @property
    def signature(self) -> Hashable:
        return self.base.serial

    def record(self) -> Record:
        tensors: dict[str, Tensor] = {}
        for index, kv in self.base.parts.items():
            tensors |= {f"{index}.keys": kv.keys.cpu(), f"{index}.values": kv.values.cpu()}
        return Record(self.name, {"segments": sorted(self.base.parts)}, tensors)


@dataclass(frozen=True, slots=True)
class ValueView:
    """A view of the immutable base KV of one value, or of the tokens that prompts begin with."""

    base: ContentBase

    @property
    def name(self) -> Name:
        return name_of(self.base.key)

    @property
    def signature(self) -> Hashable:
        return self.base.serial

    def record(self) -> Record:
        key, kv = self.base.key, self.base.kv
        tokens, context = (torch.tensor(part, dtype=torch.int64) for part in (key.tokens, key.base_context))
        tensors = {"tokens": tokens, "context": context, "keys": kv.keys.cpu(), "values": kv.values.cpu()}
        return Record(self.name, {}, tensors)


View = PoolView | TemplateView | ValueView


def keys(anchors: AnchorStore, bases: BaseStore, *, values: bool = False) -> list[Key]:
    """Return the keys of everything that can be saved now, least recently used first; base KV of values if `values`."""
    return [*bases.lasting(values=values), *(key for key, pool in anchors.pools.items() if pool.anchors)]


def view(anchors: AnchorStore, bases: BaseStore, key: Key) -> View | None:
    """Return a view of what has this key now; None if it has gone."""
    if isinstance(key, PoolKey):
        pool = anchors.pools.get(key)
        return PoolView.of(key, pool) if pool and pool.anchors else None
    base = bases.lasting_base(key)
    if isinstance(base, TemplateBase):
        return TemplateView(base)
    return ValueView(base) if base else None


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
