"""Blocks that stay allocated after their request has finished."""

from __future__ import annotations

import itertools

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock


class HeldBlocks:
    """Blocks of finished requests that are kept until all ranks have captured them."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._ids = itertools.count()
        self._held: dict[int, tuple[int, list[KVCacheBlock]]] = {}
        self.pool: BlockPool | None = None

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, block_ids: list[int]) -> int:
        """Hold blocks. Returns the id of their capture."""
        assert self.pool is not None
        blocks = [self.pool.blocks[block_id] for block_id in block_ids]
        self.pool.touch(blocks)
        capture_id = next(self._ids)
        self._held[capture_id] = (0, blocks)
        return capture_id

    def on_captured(self, capture_id: int, ranks: int) -> None:
        """Free the blocks of a capture once all ranks have read them."""
        done, blocks = self._held[capture_id]
        self._held[capture_id] = (done + ranks, blocks)
        if done + ranks == self._ranks:
            del self._held[capture_id]
            assert self.pool is not None
            self.pool.free_blocks(reversed(blocks))
