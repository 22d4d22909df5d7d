"""The anchors of one placeholder, with each agent's observations of them."""

from collections.abc import Iterable, Mapping
from itertools import islice

import torch

from kedge.anchors.anchor import Anchor, AnchorId, KeyBlock, PlaceholderSite, Query
from kedge.anchors.offsets import OffsetTable
from kedge.anchors.sites import Observation, SiteOffsets
from kedge.errors import PlanError
from kedge.structures.bounded import ENTRIES, BoundedDict

WINDOW = 5
"""A full pool drops the least used of this many anchors added earliest."""


class AnchorPool:
    """The anchors of one placeholder, at most `capacity`, with at most `max_sites` sites: the least recently observed
    goes first. `blocks` key blocks are cached; agents that saw the same values share one.
    """

    def __init__(self, capacity: int, max_sites: int = ENTRIES, blocks: int = 4) -> None:
        self.anchors: dict[AnchorId, Anchor] = {}
        """In the order in which they were added"""
        self.sites: dict[PlaceholderSite, SiteOffsets] = {}
        """Least recently observed first"""
        self._capacity, self._max_sites = capacity, max_sites
        self._blocks: BoundedDict[tuple[AnchorId, ...], KeyBlock] = BoundedDict(blocks)
        self._nbytes: int | None = None
        """Counted once and kept until something changes (None): the store asks all pools after each observation"""
        self._is_packed = False

    def find(self, query: Query) -> Anchor | None:
        """Return the anchor that equals this value, or None."""
        return next((a for a in self.anchors.values() if a.is_value(query)), None)

    def block(self, ids: tuple[AnchorId, ...]) -> KeyBlock:
        """Return the key vectors of these anchors."""
        if ids not in self._blocks:
            self._nbytes = None
        return self._blocks.use(ids, lambda: KeyBlock([self.anchors[i] for i in ids]))

    def add(self, site: PlaceholderSite, offsets: SiteOffsets, anchor: Anchor, observed: Observation) -> None:
        """Add an observation of `site` for an anchor, new or known; on an error nothing has changed.

        A site that knows the anchor keeps its old observation. A full pool then drops an anchor.
        """
        self._nbytes, self._is_packed = None, False
        if anchor.id not in offsets.anchors:
            offsets.put(anchor.id, observed)
        self.anchors.setdefault(anchor.id, anchor)
        self.sites.pop(site, None)
        self.sites[site] = offsets
        self._bound(keep=anchor.id)

    def adopt(self, anchors: Iterable[Anchor], sites: Mapping[PlaceholderSite, SiteOffsets]) -> None:
        """Take over anchors and sites of another pool of this placeholder, in its order, and drop what exceeds the
        bounds.
        """
        self._nbytes, self._is_packed = None, False
        self.anchors.update((anchor.id, anchor) for anchor in anchors)
        self.sites.update(sites)
        self._bound()

    def _bound(self, keep: AnchorId | None = None) -> None:
        while len(self.anchors) > self._capacity:
            self.drop(self.victim(keep))
        while len(self.sites) > self._max_sites:
            del self.sites[next(iter(self.sites))]
            held = {anchor for offsets in self.sites.values() for anchor in offsets.anchors}
            for anchor in self.anchors.keys() - held:
                self.drop(anchor)

    def victim(self, keep: AnchorId | None = None) -> AnchorId:
        """Return the least used of the earliest anchors, the earlier of equals; `keep` only if there is no other."""
        others = (a for a in self.anchors.values() if a.id != keep)
        window = list(islice(others, WINDOW)) or list(self.anchors.values())
        return min(window, key=lambda a: (a.hits, a.id)).id

    def drop(self, anchor: AnchorId) -> None:
        """Forget an anchor and all offsets of it."""
        for offsets in self.sites.values():
            offsets.drop(anchor)
        del self.anchors[anchor]
        self._blocks.clear()
        self._nbytes, self._is_packed = None, False

    def pack(self) -> bool:
        """Give back what dropped rows take. Returns whether any did."""
        loose = () if self._is_packed else [one for one in self.tables if len(one.arena) > one.live]
        for table in loose:
            table.pack()
        self._nbytes, self._is_packed = None if loose else self._nbytes, True
        return bool(loose)

    def hit(self, anchors: Iterable[AnchorId]) -> None:
        """Count one use of these anchors; ignores those that were dropped in the meantime."""
        for anchor in anchors:
            if anchor in self.anchors:
                self.anchors[anchor].hits += 1

    @property
    def tables(self) -> list[OffsetTable]:
        """The tables of all sites."""
        return [table for offsets in self.sites.values() for table in offsets.tables]

    @property
    def nbytes(self) -> int:
        """Return the bytes of offsets, dropped rows included, of key vectors, and of the blocks made of these."""
        if self._nbytes is None:
            tensors = [*(one.keys for one in self.anchors.values()), *(one.arena for one in self.tables)]
            self._nbytes = sum(one.nbytes for one in tensors) + sum(one.nbytes for one in self._blocks.values())
        return self._nbytes

    def check_integrity(self) -> None:
        """Raise `PlanError` where the pool is too large or counts wrong bytes, or its sites hold other anchors."""
        counted, self._nbytes = self.nbytes, None
        if counted != self.nbytes:
            raise PlanError("nbytes", counted, f"it has {self.nbytes}")
        if len(self.anchors) > self._capacity or len(self.sites) > self._max_sites:
            raise PlanError("pool", (len(self.anchors), len(self.sites)), "more anchors or sites than allowed")
        held = {anchor for offsets in self.sites.values() for anchor in offsets.anchors}
        if held != set(self.anchors):
            raise PlanError("anchors", sorted(self.anchors), f"sites hold {sorted(held)}")
        for offsets in self.sites.values():
            offsets.check_integrity()
        for anchor in self.anchors.values():
            if len(anchor.keys) != anchor.length or not torch.isfinite(anchor.keys).all():
                raise PlanError("anchor", anchor.id, "its key vectors do not fit its tokens")
