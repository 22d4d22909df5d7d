"""What outlives a process: anchor pools and base KV as records of tensors and plain data, and the way back.

Keys are unrotated, so that saved KV has no position. Base KV of values is saved where that is asked for; otherwise it
is computed again when a value first comes up. A record comes back from a file that is named after its content, for the
model that wrote it: what does not fit all the same is damage of that record and of no other.
"""

import hashlib
from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kedge.anchors.anchor import Anchor, AnchorId, PlaceholderSite, PoolKey
from kedge.anchors.base_store import BaseStore, ContentKey, LastingKey, PrefixKey
from kedge.anchors.calibration import PARTS, Calibration
from kedge.anchors.pool import AnchorPool
from kedge.anchors.sites import Observation, SiteOffsets
from kedge.anchors.store import AnchorStore
from kedge.errors import KedgeError, StateDamaged
from kedge.kv.segment import KVSegment
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


def name_of(key: Key) -> Name:
    """Return the name that what has this key is saved under. Any thread may call. O(tokens of a value)."""
    if isinstance(key, PoolKey):
        return POOL, str(key.namespace), key.workflow, key.placeholder
    if isinstance(key, PrefixKey):
        return TEMPLATE, str(key.namespace), key.template
    numbers = array("q", (len(key.base_context), *key.base_context, *key.tokens))
    return VALUE, str(key.namespace), hashlib.blake2b(numbers.tobytes(), digest_size=20).hexdigest()


# saving: the owner's thread -------------------------------------------------------------------------------------------


def keys(anchors: AnchorStore, bases: BaseStore, *, values: bool = False) -> list[Key]:
    """Return the keys of everything that can be saved now, least recently used first; base KV of values if `values`."""
    return [*bases.lasting(values=values), *(key for key, pool in anchors.pools.items() if pool.anchors)]


def signature_of(anchors: AnchorStore, bases: BaseStore, key: Key) -> Hashable | None:
    """Return what differs as soon as something of this key was learned or dropped; hits do not count. None: it has
    gone.
    """
    if not isinstance(key, PoolKey):
        base = bases.stored(key)
        return base and base.serial
    pool = anchors.pools.get(key)
    if pool is None or not pool.anchors:
        return None
    return tuple((site, of.anchors, of.calibration.observations) for site, of in pool.sites.items())


def record_of(anchors: AnchorStore, bases: BaseStore, key: Key) -> Record:
    """Return what has this key as a record, on the CPU."""
    if isinstance(key, PoolKey):
        return _pool_record(key, anchors.pools[key])
    base = bases.stored(key)
    assert base is not None
    if isinstance(key, PrefixKey):
        halves = {f"{at}.{half}": tensor for at, kv in base.parts.items() for half, tensor in _halves(kv).items()}
        return Record(name_of(key), {"segments": sorted(base.parts)}, halves)
    tokens, context = (torch.tensor(part, dtype=torch.int64) for part in (key.tokens, key.base_context))
    return Record(name_of(key), {}, {"tokens": tokens, "context": context, **_halves(base.parts[0])})


def _halves(kv: KVSegment) -> dict[str, Tensor]:
    return {"keys": kv.keys.cpu(), "values": kv.values.cpu()}


def _pool_record(key: PoolKey, pool: AnchorPool) -> Record:
    anchors, sites = pool.anchors.values(), [(site, of) for site, of in pool.sites.items() if of.anchors]
    tensors = {
        "tokens": torch.tensor([token for anchor in anchors for token in anchor.tokens]),
        "keys": torch.cat([anchor.keys for anchor in anchors]).cpu(),
    }
    for number, (_, of) in enumerate(sites):
        rows = {
            part: table.arena[table.rows_of_anchors(of.anchors)]
            for part, table in zip(("phi", "prefix"), of.tables, strict=True)
        }
        learned = {f"calibration.{part}": tensor for part, tensor in of.calibration.tensors.items()}
        tensors |= {f"{number}.{part}": tensor.cpu() for part, tensor in {**rows, **learned}.items()}
    slots = [
        {**asdict(site), "holders": [*of.anchors], "observations": of.calibration.observations} for site, of in sites
    ]
    held = [(anchor.id, anchor.hits, anchor.length) for anchor in anchors]
    return Record(name_of(key), {"anchors": held, "slots": slots}, tensors)


# restoring ------------------------------------------------------------------------------------------------------------


class Restored:
    """The content of records, rebuilt in the order in which they were added, and not yet part of any store."""

    def __init__(self, anchors: AnchorStore, like: KVSegment) -> None:
        """Restore within the bounds of `anchors`, which stays unchanged. `like` is KV, perhaps of no tokens, of the
        model's shape, dtype and device.
        """
        self._anchors, self._like = anchors, like
        self._pools: dict[PoolKey, AnchorPool] = {}
        self._bases: list[tuple[LastingKey, dict[int, KVSegment]]] = []
        """Base KV of templates' prefix segments by segment index, and of values as number 0"""

    def add(self, record: Record) -> None:
        """Rebuild one record. Raises `StateDamaged` for an invalid one, and adds nothing then."""
        try:
            if record.name[0] == POOL:
                _, space, workflow, placeholder = record.name
                key = PoolKey(Namespace.parse(space), WorkflowId(workflow), placeholder)
                self._pools[key] = self._pool(record)
            else:
                self._bases.append(self._base(record))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError, KedgeError) as error:
            raise StateDamaged("record", record.name, f"is malformed: {error!r}") from error

    def install(self, anchors: AnchorStore, bases: BaseStore) -> None:
        """Replace everything learned by the restored content. Called by the owner's thread."""
        bases.clear()
        for key, parts in self._bases:
            if isinstance(key, PrefixKey):
                bases.put_prefix(*key, parts)
            else:
                bases.put_content(*key, parts[0])
        anchors.adopt(self._pools)

    def _base(self, record: Record) -> tuple[LastingKey, dict[int, KVSegment]]:
        kind, space, name = record.name
        namespace = Namespace.parse(space)
        if kind == TEMPLATE:
            segments = record.data["segments"]
            return PrefixKey(namespace, name), {index: self._kv(record, f"{index}.") for index in segments}
        tokens, context = (tuple(record.tensors[part].tolist()) for part in ("tokens", "context"))
        return ContentKey(namespace, tokens, context), {0: self._kv(record)}

    def _kv(self, record: Record, part: str = "") -> KVSegment:
        return KVSegment(*(record.tensors[f"{part}{half}"].to(self._like.device) for half in ("keys", "values")))

    def _pool(self, record: Record) -> AnchorPool:
        device = self._like.device
        ids, hits, lengths = zip(*record.data["anchors"], strict=True)
        tokens, keys = record.tensors["tokens"].split(lengths), record.tensors["keys"].to(device).split(lengths)
        parts = zip(ids, hits, tokens, keys, strict=True)
        anchors = [Anchor(AnchorId(one), tuple(ts.tolist()), ks, hit) for one, hit, ts, ks in parts]
        of_ids = dict(zip(ids, lengths, strict=True))
        sites = dict(self._site(record, number, data, of_ids) for number, data in enumerate(record.data["slots"]))
        pool = AnchorPool(self._anchors.config.capacity)
        pool.adopt(anchors, sites)
        pool.check_integrity()
        return pool

    def _site(
        self, record: Record, number: int, data: Mapping[str, Any], lengths: Mapping[int, int]
    ) -> tuple[PlaceholderSite, SiteOffsets]:
        holders: Sequence[int] = data["holders"]
        value, prefix = (record.tensors[f"{number}.{part}"].to(self._like.device) for part in ("phi", "prefix"))
        prefix_tokens = len(prefix) // len(holders)
        offsets = SiteOffsets(self._like, prefix_tokens)
        values = value.split([lengths[holder] for holder in holders])
        prefixes = prefix.split([prefix_tokens] * len(holders))
        for holder, of_value, of_prefix in zip(holders, values, prefixes, strict=True):
            offsets.put(AnchorId(holder), Observation(of_value, of_prefix, of_value[:0], of_prefix[:0]))
        learned = {part: record.tensors[f"{number}.calibration.{part}"] for part in PARTS}
        offsets.calibration = Calibration.restored(learned, data["observations"])
        return PlaceholderSite(data["agent_key"], data["index"]), offsets
