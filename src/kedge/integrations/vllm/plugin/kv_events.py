"""vLLM's KV events for the tiers: what is stored on the host, and what is loaded back, so that routers know both.

An event of the host has `medium="CPU"` and the content that vLLM published for the same block on the device; where that
is not known any more, it has the hash alone, as those of vLLM's own offloading have.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, get_block_hash, get_group_id, maybe_convert_block_hash

from kedge.integrations.vllm.plugin.block_pools import known_blocks
from kedge.integrations.vllm.plugin.owner_sets import Owner
from kedge.policies.sessions import SessionKey
from kedge.structures.bounded import BoundedDict

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

logger = logging.getLogger(__name__)
HOST_MEDIUM = "CPU"


def events_refusal(pool: BlockPool) -> str | None:
    """Return the reason why the host tier beside a pool cannot have events, or None."""
    return None if hasattr(pool, "medium") else "vLLM's block pool has no medium"  # since 0.30


def pool_options(device: BlockPool) -> dict[str, Any]:
    """Return the arguments of a host's pool with events; none where vLLM publishes none, or where there can be none,
    with a line in the log.
    """
    if not device.enable_kv_cache_events:
        return {}
    if refusal := events_refusal(device):
        logger.warning("kedge: events of the host tier are off: %s", refusal)
        return {}
    return {"enable_kv_cache_events": True, "medium": HOST_MEDIUM}


class TierEvents:
    """Publishes what copies change in both tiers. Owned by the scheduler."""

    def __init__(self, device: BlockPool, host: BlockPool) -> None:
        """Watch the events of `device`, which say what its blocks have in them."""
        self._host, self._take = host, device.take_events
        self._contents: BoundedDict[object, BlockStored] = BoundedDict(2 * (len(device.blocks) + len(host.blocks)))
        device.take_events = self._watch

    def stored(self, pool: BlockPool, keys: Iterable[BlockHashWithGroupId], owner: Owner | None) -> None:
        """Publish that blocks are in `pool` now. The events name the session of `owner` if its client has named it."""
        for one in map(_published, keys):
            known = self._contents.get(one) or _placeholder(*one)
            event = msgspec.structs.replace(known, medium=pool.medium)
            if "session_id" in event.__struct_fields__:
                event.session_id = _session_id(owner)
            pool.kv_event_queue.append(event)

    def clear(self) -> None:
        """Empty the host. Only its own blocks are published as removed: what vLLM says of a whole pool is of all."""
        held = [_published(BlockHashWithGroupId(key)) for key in known_blocks(self._host)]
        self._host.reset_prefix_cache()
        events = [event for event in self._host.kv_event_queue if not isinstance(event, AllBlocksCleared)]
        events += [BlockRemoved([one], medium=HOST_MEDIUM, group_idx=group) for one, group in held]
        self._host.kv_event_queue = events

    def take(self) -> list[KVCacheEvent]:
        """Return the events of the host since the last call."""
        return self._host.take_events()

    def _watch(self) -> list[KVCacheEvent]:
        """Take the events of the device for vLLM, and remember what they say of blocks.

        One that clears all media is followed by what the host still has.
        """
        events = self._take()
        for event in events:
            if isinstance(event, BlockStored) and event.token_ids:
                self._contents.update(((one.block_hashes[0], _group(one)), one) for one in _by_block(event))
            elif isinstance(event, AllBlocksCleared):
                self.stored(self._host, map(BlockHashWithGroupId, list(known_blocks(self._host))), None)
        return events


def _published(key: BlockHashWithGroupId) -> tuple[Any, int]:
    """Return the hash and the group of a block as events have them."""
    return maybe_convert_block_hash(get_block_hash(key)), get_group_id(key)


def _group(event: BlockStored) -> int:
    return getattr(event, "group_idx", None) or 0


def _session_id(owner: Owner | None) -> str | None:
    return owner.name if isinstance(owner, SessionKey) and isinstance(owner.name, str) else None


def _by_block(event: BlockStored) -> Iterator[BlockStored]:
    """Yield the events of the single blocks of one."""
    parents: Sequence[object] = (event.parent_block_hash, *event.block_hashes)
    keys = event.extra_keys or [None] * len(event.block_hashes)
    for at, one in enumerate(event.block_hashes):
        tokens = event.token_ids[at * event.block_size : (at + 1) * event.block_size]
        own = {"block_hashes": [one], "parent_block_hash": parents[at], "token_ids": list(tokens)}
        yield msgspec.structs.replace(event, **own, extra_keys=[keys[at]])


def _placeholder(block_hash: object, group: int) -> BlockStored:
    plain = BlockStored([block_hash], None, token_ids=[], block_size=0, lora_id=None, medium=None, lora_name=None)
    return msgspec.structs.replace(plain, group_idx=group) if group else plain
