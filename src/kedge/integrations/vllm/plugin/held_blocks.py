"""Blocks that stay allocated after their request has finished."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kedge.reuse.lanes import LaneBudget


class HeldLane(NamedTuple):
    """Positions to be computed by a lane in held blocks."""

    tokens: list[int]
    """All tokens before and in the lane, and one more, so that the runner draws none"""
    blocks: list[int]
    span: range


class HeldLanes:
    """A source of lanes in held blocks, granted step by step."""

    def __init__(self) -> None:
        self._granted: list[HeldLane] = []

    @property
    def has_granted(self) -> bool:
        """Whether there are lanes in this step."""
        return bool(self._granted)

    @property
    def taken(self) -> LaneBudget:
        """What the lanes of this step take of it."""
        return LaneBudget(sum(len(lane.span) for lane in self._granted), len(self._granted))

    def take_granted(self) -> list[HeldLane]:
        """Return the lanes of this step."""
        granted, self._granted = self._granted, []
        return granted


class HeldBlocks:
    """Blocks of no running request: of finished ones, and of base prefills. They are kept until all ranks have captured
    them.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._ids = itertools.count()
        self._held: dict[int, tuple[int, list[KVCacheBlock]]] = {}
        self.pool: BlockPool | None = None

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, block_ids: Sequence[int]) -> int:
        """Hold blocks. Returns the id of their capture."""
        assert self.pool is not None
        blocks = [self.pool.blocks[block_id] for block_id in block_ids]
        self.pool.touch(blocks)
        capture_id = next(self._ids)
        self._held[capture_id] = (0, blocks)
        return capture_id

    @property
    def free_blocks(self) -> int:
        """Number of blocks that nothing holds."""
        assert self.pool is not None
        return self.pool.get_num_free_blocks()

    def blocks_of(self, capture_id: int) -> list[int]:
        """Return the ids of the blocks of a capture, in their order."""
        return [block.block_id for block in self._held[capture_id][1]]

    def grow(self, capture_id: int, count: int, spare: int) -> bool:
        """Hold at least `count` blocks for a capture. Returns False where fewer than `spare` would be left free."""
        blocks = self._held[capture_id][1]
        missing = max(0, count - len(blocks))
        assert self.pool is not None
        if missing and missing + spare > self.pool.get_num_free_blocks():
            return False
        blocks.extend(self.pool.get_new_blocks(missing) if missing else ())
        return True

    @property
    def block_ids(self) -> list[int]:
        """The ids of the held blocks, each as often as it is held."""
        return [block.block_id for _, blocks in self._held.values() for block in blocks]

    def give_up(self) -> None:
        """Free all blocks."""
        for capture_id in tuple(self._held):
            self.free(capture_id)

    def on_captured(self, capture_id: int, ranks: int) -> None:
        """Free the blocks of a capture once all ranks have read them. One that was given up is ignored."""
        if capture_id not in self._held:
            return
        done, blocks = self._held[capture_id]
        self._held[capture_id] = (done + ranks, blocks)
        if done + ranks == self._ranks:
            self.free(capture_id)

    def free(self, capture_id: int) -> None:
        """Free the blocks of a capture."""
        _, blocks = self._held.pop(capture_id)
        assert self.pool is not None
        self.pool.free_blocks(reversed(blocks))
