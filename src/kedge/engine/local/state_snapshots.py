"""Snapshots of recurrent states: a prompt that begins like an earlier one goes on where that one's states were copied.

KV of a token is there for as long as its block is; a recurrent layer has one state only, that after the last token. So
states are copied at the ends of blocks where a later prompt is likely to part from this one: the end of the agent's
fixed prompt, the point where it has parted from a cached prompt, the end of the prompt, the end of the turn. Only up to
such a point KV is reused.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import islice

from kedge.cache import CacheManager
from kedge.engine.local.model.recurrent import RecurrentLayers
from kedge.engine.local.sequence import RequestSequence
from kedge.engine.local.sequence import Sequence as AnySequence
from kedge.engine.local.states import States
from kedge.structures.prefixes import chain_of
from kedge.types import GenerateRequest, Namespace, ReuseMode

LOOKED_AT = 8
"""Snapshots, the least recently used, among which one goes whose KV is gone, else the first."""
MAX_SNAPSHOTS = 4096
"""Most snapshots that are kept, however small."""

FixedLength = Callable[[GenerateRequest, float], int | None]
"""(request, now in seconds) -> tokens of the fixed prompt that it begins with, if known"""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The states after some tokens."""

    namespace: Namespace
    tokens: tuple[int, ...]
    states: States
    nbytes: int


@dataclass(frozen=True, slots=True)
class SnapshotStats:
    """What is kept, and counts since the start."""

    count: int
    nbytes: int
    hits: int
    """Sequences that went on from a snapshot."""
    misses: int
    """Sequences that reuse exact KV and found none to go on from."""
    evicted: int
    refused: int
    """Snapshots that alone would have taken more than all of the memory."""


class StateSnapshots:
    """The snapshots of an engine, and the states of its running sequences. Without recurrent layers there are none of
    either. Called by the engine's owner thread only.
    """

    def __init__(
        self, recurrent: RecurrentLayers, cache: CacheManager, max_bytes: int, fixed_length: FixedLength
    ) -> None:
        """Start empty, with room for `max_bytes` of states."""
        self._recurrent, self._cache, self._max_bytes, self._fixed_length = recurrent, cache, max_bytes, fixed_length
        self._kept: OrderedDict[Hashable, Snapshot] = OrderedDict()
        self._nbytes = self._hits = self._misses = self._evicted = self._refused = 0

    # admission ------------------------------------------------------------------------------------------------

    def reusable(self, sequence: AnySequence) -> int:
        """Return how many leading tokens of a sequence may come from either tier."""
        if not self._recurrent:
            return sequence.exact_limit
        return self._longest(sequence, sequence.exact_limit)

    def limit(self, sequence: AnySequence) -> int:
        """Return how many leading tokens of a sequence may come from the device tier now."""
        if not self._recurrent or not sequence.exact_limit:
            return sequence.exact_limit
        cached = self._cache.match(sequence.namespace, sequence.tokens[: sequence.exact_limit])
        return self._longest(sequence, cached.tokens_count)

    def begin(self, sequence: AnySequence, start: int) -> None:
        """Give a sequence the states after its first `start` tokens, which `limit` has returned."""
        if not self._recurrent:
            return
        sequence.boundary, sequence.stops = None, self._stops(sequence, start)
        if not start:
            sequence.states = self._recurrent.new()
            self._misses += bool(sequence.exact_limit)
            return
        key = self._key(sequence, start)
        self._kept.move_to_end(key)
        self._hits += 1
        sequence.states = self._kept[key].states.copied()

    def _longest(self, sequence: AnySequence, most: int) -> int:
        """Return the length of the longest snapshot that a sequence begins with, up to `most` tokens."""
        size = self._cache.block_size
        chain = self._chain(sequence, most)
        for blocks in range(len(chain), 0, -1):
            found = self._kept.get((sequence.namespace, chain[blocks - 1], blocks * size))
            if found and list(found.tokens) == list(sequence.tokens[: blocks * size]):
                return blocks * size
        return 0

    def _chain(self, sequence: AnySequence, length: int) -> list[Hashable]:
        turn = sequence.turn if isinstance(sequence, RequestSequence) else None
        return chain_of(sequence.tokens[:length], self._cache.block_size, turn.chain if turn else ())

    def _key(self, sequence: AnySequence, length: int) -> Hashable:
        return sequence.namespace, self._chain(sequence, length)[-1], length

    def _stops(self, sequence: AnySequence, start: int) -> tuple[int, ...]:
        """Return the ends of blocks, ascending, after which the states of a sequence are copied as it is computed."""
        if not sequence.exact_limit or not isinstance(sequence, RequestSequence):
            return ()
        size, request = self._cache.block_size, sequence.request
        cached = self._cache.status(sequence.namespace, sequence.tokens[: sequence.exact_limit])
        fixed = self._fixed_length(request, time.monotonic()) or 0
        ends = (fixed, cached.device_tokens + cached.host_tokens, request.prompt_tokens - 1)
        return tuple(sorted({at for end in ends if start < (at := end // size * size) < len(sequence.tokens)}))

    # passes ---------------------------------------------------------------------------------------------------

    def computed(self, sequence: AnySequence, end: int) -> None:
        """Copy the states of a sequence after a pass that has computed its tokens up to `end`, if that is worth it."""
        if sequence.states is None or not isinstance(sequence, RequestSequence):
            return
        if end in sequence.stops:
            self._keep(sequence, end, sequence.states.copied())
            return
        is_in_answer = end > sequence.request.prompt_tokens and sequence.request.reuse is not ReuseMode.OFF
        if is_in_answer and end % self._cache.block_size == 0:
            sequence.boundary = (end, sequence.states.copied())

    def ended(self, sequence: AnySequence, exact_tokens: int) -> None:
        """Keep the last states of a sequence that has ended, where its first `exact_tokens` tokens stay cached."""
        if sequence.boundary is not None and sequence.boundary[0] <= exact_tokens:
            self._keep(sequence, *sequence.boundary)
        sequence.states = sequence.boundary = None

    # the store ------------------------------------------------------------------------------------------------

    def _keep(self, sequence: AnySequence, length: int, states: States) -> None:
        """Keep states; what was used longest ago goes, of snapshots without KV the first."""
        key, tokens = self._key(sequence, length), tuple(sequence.tokens[:length])
        new = Snapshot(sequence.namespace, tokens, states, states.nbytes + 8 * length)
        self._drop(key)
        if new.nbytes > self._max_bytes:
            self._refused += 1
            return
        while self._kept and (self._nbytes + new.nbytes > self._max_bytes or len(self._kept) >= MAX_SNAPSHOTS):
            self._drop(self._victim())
            self._evicted += 1
        self._kept[key] = new
        self._nbytes += new.nbytes

    def _victim(self) -> Hashable:
        """Return the key of the snapshot that goes next."""
        oldest = list(islice(self._kept.items(), LOOKED_AT))
        return next((key for key, one in oldest if not self._has_kv(one)), oldest[0][0])

    def _has_kv(self, snapshot: Snapshot) -> bool:
        status = self._cache.status(snapshot.namespace, snapshot.tokens)
        return status.device_tokens + status.host_tokens >= len(snapshot.tokens)

    def _drop(self, key: Hashable) -> None:
        if old := self._kept.pop(key, None):
            self._nbytes -= old.nbytes

    def clear(self) -> None:
        """Forget all snapshots; running sequences go on."""
        self._kept.clear()
        self._nbytes = 0

    def stats(self) -> SnapshotStats:
        """Return a snapshot of the figures."""
        return SnapshotStats(len(self._kept), self._nbytes, self._hits, self._misses, self._evicted, self._refused)
