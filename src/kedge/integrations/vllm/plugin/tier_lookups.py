"""What the two tiers have of a prompt: leading blocks, blocks that one of them lacks, loads that bring some."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

from kedge.integrations.vllm.plugin.block_pools import any_of, cached_block, cached_prefix, known_blocks
from kedge.integrations.vllm.plugin.block_transfers import BlockTransfer, BlockTransfers
from kedge.integrations.vllm.plugin.cache_groups import NeededBlocks
from kedge.integrations.vllm.plugin.free_queue import StepFreeQueue
from kedge.integrations.vllm.plugin.owner_sets import Owner
from kedge.structures.prefixes import leading_count


class TierLookups(BlockTransfers):
    """Look-ups in both tiers and in the copies between them. They change nothing."""

    queue: StepFreeQueue
    """Of the host"""

    def holds(self, block_hash: BlockHash) -> bool:
        """Return whether the host has this block of the main group."""
        return cached_block(self.host, block_hash) is not None

    def prefixes(self, hashes: Sequence[BlockHash], owner: Owner) -> tuple[int, int]:
        """Return how many leading blocks of a prompt the host has or is about to have, and how many of them `owner`
        owns there. O(log n) look-ups, and O(1) where these are all that it owns.

        What is in a tier is a prefix, since prompts are evicted from their ends.
        """
        guess = self.queue.members_of(owner)
        held = cached_prefix(self.host, hashes, self._backing_up, guess=guess)

        def is_owned(at: int) -> bool:
            block = cached_block(self.host, hashes[at])
            return block is not None and self.queue.owns(block.block_id, owner)

        return held, leading_count(is_owned, held, guess=guess)

    def extent(self, hashes: Sequence[BlockHash], stop: int | None = None) -> tuple[int, int]:
        """Return how many of the first `stop` blocks of a prompt are on the device, and how many in either tier.

        What is being loaded counts as being on the device. O(log n) look-ups; O(n) with several groups.
        """
        first = cached_prefix(self.device, hashes, self._loading, 0, stop)
        if not self.groups.others:
            return first, cached_prefix(self.host, hashes, (), first, stop)
        tiers = (known_blocks(self.device), self._loading, known_blocks(self.host))
        return first, self.groups.reach(hashes, stop, lambda key: any(key in one for one in tiers))

    def next_load(self, hashes: Sequence[BlockHash], block: int) -> tuple[BlockTransfer | None, bool]:
        """Return the load under way that brings a block of a prompt, and whether one could bring it from the host."""
        if not self.groups.others:
            one = hashes[block]  # a draft's head lets vLLM compute the last block that it finds again
            return self.loading(one), self.holds(one) and cached_block(self.device, one) is None
        first, stop = self.extent(hashes)
        coming = self.groups.needed(hashes[:first]).keys if first > block else ()
        return next(filter(None, map(self._loading.get, reversed(coming))), None), stop > max(block, first)

    def _split(self, hashes: Sequence[BlockHash]) -> tuple[list[KVCacheBlock], NeededBlocks, list[KVCacheBlock]]:
        """Return what the device has of what a hit needs, and what the host has to bring, with its blocks there."""
        on_device, on_host, above = known_blocks(self.device), known_blocks(self.host), list[KVCacheBlock]()
        needed, brought, sources = self.groups.needed(hashes), list[int](), list[KVCacheBlock]()
        for at, key in enumerate(needed.keys):
            if block := on_device.get(key):
                above.append(any_of(block))
            elif block := on_host.get(key):
                brought.append(at)
                sources.append(any_of(block))
            elif key not in self._loading:
                break
        return above, needed.chosen(brought), sources

    def _lacking(
        self, hashes: Sequence[BlockHash], start: int, limit: int | None
    ) -> tuple[list[KVCacheBlock], NeededBlocks, int]:
        """Return device blocks that the host lacks, what they hold, and the index after the last look."""
        blocks, found = list[KVCacheBlock](), list[int]()
        on_device, on_host, under_way = known_blocks(self.device), known_blocks(self.host), self._backing_up
        needed, done = self.groups.needed(hashes, start), self.groups.count(len(hashes))
        for at, key in enumerate(needed.keys):
            if len(blocks) == limit:
                done = start + at
                break
            if key in on_host or key in under_way:
                continue
            block = on_device.get(key)
            if block is None:
                break
            blocks.append(any_of(block))
            found.append(at)
        return blocks, needed.chosen(found), done
