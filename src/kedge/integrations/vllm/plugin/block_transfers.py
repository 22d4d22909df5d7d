"""The copies between vLLM's device blocks and the host's that have been ordered and have not ended.

| blocks of a copy | from its order to its end                  | afterwards                                    |
|------------------|--------------------------------------------|-----------------------------------------------|
| sources          | held (`touch`), so nothing overwrites them | as free as before                             |
| targets          | held, without a hash: lookups miss them    | hashed, owned and free; without KV on failure |
| before them in a | held on the device, since a load behind    | free, and evicted after the targets           |
| loaded prompt    | them is no use without them                |                                               |

When a tier is emptied, copies are abandoned: their targets alone stay held until they end, so that no late write meets
new KV.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

from kedge.cache import Copy, Direction
from kedge.cache.copies import Purpose
from kedge.integrations.vllm.plugin.block_pools import free_blocks, groups_in, hold_blocks
from kedge.integrations.vllm.plugin.cache_groups import NeededBlocks
from kedge.integrations.vllm.plugin.messages import CopyResult
from kedge.integrations.vllm.plugin.owner_sets import Owner


@dataclass(eq=False, slots=True)
class BlockTransfer:
    """A copy that has been ordered, with the blocks that it holds."""

    copy: Copy
    purpose: Purpose
    needed: NeededBlocks
    """What its blocks hold"""
    sources: list[KVCacheBlock]
    targets: list[KVCacheBlock]
    owner: Owner | None
    demanded: bool = False
    """Whether a request waits for it."""
    result: CopyResult | None = None
    """Merged over the ranks that have finished"""
    prefix: list[KVCacheBlock] = field(default_factory=list)
    """Device blocks of the prompt before those that are loaded"""
    abandoned: bool = False
    """Whether a tier was emptied meanwhile: only the targets are held, until no worker writes to them any more"""

    @property
    def is_load(self) -> bool:
        """Whether it goes from the host to the device."""
        return self.copy.direction is Direction.LOAD


class BlockTransfers:
    """Copies between two pools, from their order to their end. Owned by the scheduler."""

    def __init__(self, device: BlockPool, host: BlockPool) -> None:
        """Begin without copies between these pools."""
        self.device, self.host, self.groups = device, host, groups_in(device)
        self._ids = itertools.count()
        self._transfers: dict[int, BlockTransfer] = {}
        self._loading: dict[bytes, BlockTransfer] = {}
        self._backing_up: dict[bytes, BlockTransfer] = {}
        self._new_copies: list[Copy] = []

    @property
    def busy(self) -> bool:
        """Whether a copy has been ordered and has not ended."""
        return bool(self._transfers)

    @property
    def prefetching(self) -> int:
        """Number of prefetches that have not ended."""
        return sum(transfer.purpose is Purpose.PREFETCH for transfer in self._transfers.values())

    @property
    def loads(self) -> int:
        """Number of loads under way."""
        return sum(transfer.is_load for transfer in self._transfers.values())

    @property
    def blocks_loading(self) -> int:
        """Number of blocks that loads under way bring."""
        return sum([len(one.targets) for one in self._transfers.values() if one.is_load and not one.abandoned])

    @property
    def backing_up(self) -> int:
        """Number of blocks that are being copied to the host."""
        return len(self._backing_up)

    def loading(self, block_hash: BlockHash) -> BlockTransfer | None:
        """Return the load that brings this block of the main group, if there is one."""
        return self._loading.get(block_hash + self.groups.main.key_end)

    def _enqueue(
        self,
        direction: Direction,
        purpose: Purpose,
        needed: NeededBlocks,
        sources: list[KVCacheBlock],
        targets: list[KVCacheBlock],
        owner: Owner | None,
    ) -> BlockTransfer:
        hold_blocks(self._pools(direction)[0], sources)
        copy = Copy(next(self._ids), direction, _ids(sources), _ids(targets))
        is_demand = purpose is Purpose.DEMAND
        transfer = BlockTransfer(copy, purpose, needed, sources, targets, owner, is_demand)
        self._transfers[copy.copy_id] = transfer
        self._new_copies.append(copy)
        return transfer

    def take_copies(self) -> tuple[Copy, ...]:
        """Return the copies that were ordered since the last call."""
        copies, self._new_copies = tuple(self._new_copies), []
        return copies

    def _pools(self, direction: Direction) -> tuple[BlockPool, BlockPool]:
        """Return (source, target)."""
        return (self.host, self.device) if direction is Direction.LOAD else (self.device, self.host)

    # emptying a tier ------------------------------------------------------------------------------------------

    def held_on_device(self) -> list[int]:
        """Return the ids of the device blocks that copies hold, each as often as it is held."""
        blocks = list[KVCacheBlock]()
        for transfer in self._transfers.values():
            if transfer.is_load:
                blocks += transfer.prefix + transfer.targets
            elif not transfer.abandoned:
                blocks += transfer.sources
        return list(_ids(blocks))

    @contextmanager
    def without_copies(self) -> Iterator[None]:
        """Abandon all copies: what they bring is dropped, and they hold no block inside of the `with`.

        Afterwards the targets of those that a worker has been sent are held again, until they end.
        """
        unsent = {copy.copy_id for copy in self._new_copies}
        for transfer in self._transfers.values():
            self._let_go(transfer)
        self._transfers = {key: transfer for key, transfer in self._transfers.items() if key not in unsent}
        self._new_copies = []
        self._loading.clear()
        self._backing_up.clear()
        try:
            yield
        finally:
            for transfer in self._transfers.values():
                hold_blocks(self._pools(transfer.copy.direction)[1], transfer.targets)

    def _let_go(self, transfer: BlockTransfer) -> None:
        source, target = self._pools(transfer.copy.direction)
        free_blocks(target, transfer.prefix + transfer.targets)
        if not transfer.abandoned:
            free_blocks(source, transfer.sources)
        transfer.abandoned, transfer.prefix = True, []


def _ids(blocks: Sequence[KVCacheBlock]) -> tuple[int, ...]:
    return tuple([block.block_id for block in blocks])
