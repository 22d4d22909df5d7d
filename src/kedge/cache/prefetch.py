"""Prefetches: fixed prompts that are loaded before their agents call (KVFlow, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable

from kedge.cache.copies import Direction, Purpose
from kedge.cache.node import State, TreeNode
from kedge.cache.tiers import Tiers, missing
from kedge.policies.prefetch import Candidate, is_awaited, is_within, may_replace
from kedge.structures.lazy_heap import LazyHeap


class Prefetcher:
    """Starts prefetches: it keeps the labels that have come near or have lost their device blocks, best first."""

    def __init__(self, tiers: Tiers, probability: Callable[[TreeNode], float]) -> None:
        """Take `probability(node)`: how likely a node is needed as soon as its step says."""
        self._tiers, self._probability = tiers, probability
        self._window = tiers.settings.prefetch_window
        self._targets: LazyHeap[TreeNode] = LazyHeap(lambda node: self._candidate(node).order, self._is_target)
        self.due = False
        """Whether something has changed since the last look: the forecast, what is loaded, or who holds blocks."""

    def consider(self, node: TreeNode) -> None:
        """Consider `node`, which has a label or another step now, or has left the device."""
        if self._is_target(node):
            self._targets.push(node)
            self.due = True

    def cancel_outside(self) -> None:
        """Cancel loads that have not started, that no request waits for, and whose step is outside the window."""
        for transfer in self._tiers.transfers.queued(Direction.LOAD):
            if not (is_within(transfer.end.step, self._window) or transfer.demanded or transfer.outcome):
                self._tiers.cancel(transfer)

    def start(self) -> None:
        """Queue the loads that have room, best first. Those without are tried again when it is due."""
        if not self.due:
            return
        self.due = False
        slots = self._tiers.settings.prefetch_jobs - self._pending()
        refused: list[TreeNode] = []
        while slots > len(refused) and (node := self._targets.pop()):
            slots -= self._load(self._candidate(node))
            if self._is_target(node):
                refused.append(node)
        for node in refused:
            self._targets.push(node)

    def _pending(self) -> int:
        return sum(transfer.purpose is Purpose.PREFETCH for transfer in self._tiers.pending())

    def _is_target(self, node: TreeNode) -> bool:
        """Return whether it ends a prompt within the window, is on the host only, and not on its way."""
        is_near = bool(node.labels) and node.state is State.HOST and is_within(node.step, self._window)
        return is_near and (not is_awaited(node.step) or self._pays(node))

    def _pays(self, node: TreeNode) -> bool:
        """Return whether a request that waits had better load its prompt than compute it: nothing hides the load."""
        blocks = sum(step.size for step in missing(node))
        ahead = self._tiers.transfers.demanded_blocks(Direction.LOAD)
        return self._tiers.cost.load_pays(blocks, blocks * self._tiers.tree.block_size, ahead)

    def _candidate(self, node: TreeNode) -> Candidate[TreeNode]:
        assert node.step is not None
        return Candidate(node, node.step, self._probability(node), sum(step.size for step in missing(node)))

    def _load(self, candidate: Candidate[TreeNode]) -> bool:
        settings = self._tiers.settings
        transfer = self._tiers.load(
            candidate.node,
            Purpose.PREFETCH,
            lambda victim: (
                not victim.wanted
                and may_replace(victim, candidate.step, settings.unlabelled_step, candidate.probability)
            ),
            settings.decode_reserve,
        )
        return transfer is not None
