"""Matching a value against anchors, once for all agents that read it."""

from __future__ import annotations

from collections.abc import Hashable

from kedge.anchors.anchor import AnchorId, Query
from kedge.anchors.estimators.blending import Match, Proposal
from kedge.anchors.keys import KeyReader
from kedge.anchors.pool import AnchorPool
from kedge.anchors.registry import make_estimator
from kedge.kv.segment import KVSegment
from kedge.reuse.contracts import SampleView
from kedge.settings import AnchorSettings
from kedge.structures.bounded import BoundedDict

_REMEMBERED = 64


class Matcher:
    """The estimator with a bounded cache of its proposals."""

    def __init__(self, config: AnchorSettings) -> None:
        self._reader = KeyReader(config.match_layer, config.match_dim)
        self._estimator = make_estimator(config)
        self._queries: BoundedDict[Hashable, Query] = BoundedDict(_REMEMBERED)
        self._proposals: BoundedDict[Hashable, tuple[Proposal, int | None]] = BoundedDict(_REMEMBERED)

    def query(self, sample: SampleView) -> Query:
        """Return the key vectors of a value, remembered by the name of its base KV."""
        return self._queries.use((sample.pool, sample.key), lambda: self._reader.read(sample.tokens, sample.base))

    def key_width(self, base: KVSegment) -> int:
        """Return the width of a key vector for base KV of this shape."""
        return self._reader.width(base)

    def lacks(self, pool: AnchorPool, ids: tuple[AnchorId, ...], tokens: int) -> str:
        """Return why these anchors cannot serve a value of `tokens` tokens, or the empty text."""
        if not ids:
            return "no anchor of this agent yet"
        short = self._estimator.aligned and not len(pool.block(ids).long_enough(tokens))
        return "longer than every anchor" if short else ""

    def match(self, pool: AnchorPool, ids: tuple[AnchorId, ...], sample: SampleView) -> Match:
        """Return the match of a value with these anchors. Called only where `lacks` returns the empty text."""
        query, block = self.query(sample), pool.block(ids)

        def propose() -> tuple[Proposal, int | None]:
            known = pool.find(query)
            same = ids.index(known.id) if known is not None and known.id in ids else None
            return self._estimator.propose(query, block, same), same

        proposal, same = self._proposals.use((sample.pool, sample.key, ids), propose)
        return Match(query, block, same, proposal)

    def clear(self) -> None:
        """Forget all queries and matches."""
        self._queries.clear()
        self._proposals.clear()
