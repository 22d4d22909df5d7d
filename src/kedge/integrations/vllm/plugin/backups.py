"""When KV moves from the device to the host: the fixed prompts of agents, and what a turn has added to a session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

from kedge.integrations.vllm.plugin.block_pools import own_known, own_prefix
from kedge.integrations.vllm.plugin.host_tier import HostTier
from kedge.integrations.vllm.plugin.owner_sets import Owner
from kedge.policies.eviction import StepView, distance
from kedge.policies.sessions import SessionKey
from kedge.structures.bounded import BoundedDict

MAX_PENDING = 1024
"""Sessions whose backups are not done; the one whose turn ended longest ago is given up."""
SHARE = 2
"""One of so many device blocks may be held by backups."""


@dataclass(frozen=True, slots=True)
class FinishedHistory:
    """What a session has on the device at the end of a turn."""

    session: SessionKey
    hashes: Sequence[BlockHash]
    """Of its blocks with KV"""
    computed_from: int
    """Index of the first block that the turn computed"""
    left: Sequence[KVCacheBlock] = ()
    """Blocks that were its own before the turn, and are not any more"""


class HostBackups:
    """Orders backups into the host tier, over blocks there that are needed no sooner. Owned by the scheduler."""

    def __init__(self, tier: HostTier, unlabelled_step: float) -> None:
        self._tier, self._unlabelled_step = tier, unlabelled_step
        self._limit = max(1, tier.device.num_gpu_blocks // SHARE)
        self._pending: BoundedDict[Owner, tuple[Sequence[BlockHash], int]] = BoundedDict(MAX_PENDING)
        """Histories, and the index from which on they are not done"""

    @property
    def busy(self) -> bool:
        """Whether histories wait for a backup."""
        return bool(self._pending)

    def fixed_prompt(self, hashes: Sequence[BlockHash], owner: Owner, step: float) -> None:
        """Order the backup of an agent's fixed prompt, which is needed in `step` steps."""
        own_prefix(self._tier.host, hashes, owner)
        self._tier.back_up(hashes, owner, partial(self._is_no_sooner, step))

    def history(self, history: FinishedHistory) -> None:
        """Order the backup of a session whose turn has ended.

        O(blocks that the host lacks, or that change their owners there, + log n).
        """
        hashes, owner = history.hashes, history.session
        if history.left:
            self._leave(history.left, owner)
        held, owned = self._tier.prefixes(hashes, owner)
        if owned < held:
            own_known(self._tier.host, self._tier.groups.needed(hashes[:held], owned).keys, owner)
        self._pending[owner] = (hashes, min(held, history.computed_from))
        self.go_on()

    def _leave(self, blocks: Sequence[KVCacheBlock], owner: Owner) -> None:
        """Give up on the host what a session has left behind on the device, where several blocks may hold the same."""
        known = self._tier.host.cached_block_hash_to_block
        found = [known.get_one_block(one) for one in {block.block_hash: None for block in blocks if block.block_hash}]
        self._tier.queue.leave([block for block in found if block is not None and not block.ref_cnt], owner)

    def go_on(self) -> None:
        """Order the next backups, as far as they may hold device blocks. Call this once per step."""
        while self._pending and (room := self._limit - self._tier.backing_up) > 0:
            owner, (hashes, start) = self._pending.popitem(last=False)
            if self._tier.queue.has_step(owner):
                may_evict = partial(self._is_no_sooner, self._tier.queue.step_of(owner))
                done = self._tier.back_up(hashes, owner, may_evict, start, room)
                if done < self._tier.groups.count(len(hashes)):
                    self._pending[owner] = (hashes, done)

    def _is_no_sooner(self, step: float, victim: StepView) -> bool:
        return distance(victim, self._unlabelled_step) >= step
