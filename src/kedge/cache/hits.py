"""What a request's exact prefix counts as: hits by where their KV came from, and copies of what is hit often."""

from __future__ import annotations

from kedge.cache.node import HOST, TreeNode
from kedge.cache.tiers import Tiers
from kedge.types import Source, Span


class Hits:
    """The count of the hits of one cache."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers, self._block_size = tiers, tiers.tree.block_size

    def count(self, node: TreeNode) -> tuple[Span, ...]:
        """Count a hit of `node` and all above it. Returns their tokens by source."""
        spans: list[Span] = []
        for step in node.path_down():
            source = self._source(step)
            start = spans[-1].stop if spans else 0
            stop = start + step.size * self._block_size
            if spans and spans[-1].source is source:
                start = spans.pop().start
            spans.append(Span(start, stop, source))
            self._tiers.pools.hit(step)
        self.back_up(node)
        return tuple(spans)

    def _source(self, node: TreeNode) -> Source:
        """Return where a request that hits `node` has its KV from, and count it."""
        tokens = node.size * self._block_size
        if node.arrival is None:
            return Source.DEVICE
        if node.arrival.demanded:
            self._tiers.counters.host_hit_tokens += tokens
            return Source.HOST
        self._tiers.counters.prefetched_hit_tokens += tokens
        return Source.DEVICE

    def back_up(self, node: TreeNode) -> None:
        """Back up what of the path to `node` has been hit often enough; fixed prompts are when they are labelled."""
        hits = self._tiers.settings.backup_hits
        if hits is None or not self._tiers.host_blocks:
            return
        often = next((step for step in node.path() if step.hits >= hits), None)
        if often is not None and often.parent is not None and not often.blocks[HOST]:
            self._tiers.backups.back_up(often)


def extended(spans: tuple[Span, ...], tokens: int) -> tuple[Span, ...]:
    """Return `spans` with so many more tokens that were on the device."""
    if not tokens:
        return spans
    start = stop = spans[-1].stop if spans else 0
    if spans and spans[-1].source is Source.DEVICE:
        start, spans = spans[-1].start, spans[:-1]
    return (*spans, Span(start, stop + tokens, Source.DEVICE))
