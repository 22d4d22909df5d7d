"""Requests that wait for KV from the host: which ones, for how long, and when they stop waiting."""

from __future__ import annotations

import time

from kedge.cache import CacheManager, Readiness
from kedge.engine.local.sequence import RequestSequence
from kedge.policies.prefetch import MAX_WAIT_S


class Loading:
    """The loading of requests' KV from the host. Without a host tier no request waits."""

    def __init__(self, cache: CacheManager, has_host: bool) -> None:
        self._cache, self._has_host = cache, has_host
        self.lets_pass = True
        """Whether others go before a request that waits (KVFlow: status-aware scheduling); a benchmark says False"""
        self._waited, self._stall_s = 0, 0.0

    def is_ready(self, sequence: RequestSequence) -> bool:
        """Return whether to admit `sequence` now: its KV is there (always if it was prepared), or it has waited so long
        that the rest is computed.
        """
        if not self._has_host or sequence.gave_up or sequence.is_prepared or not sequence.exact_limit:
            return True
        if sequence.load_asked is not None and time.monotonic() - sequence.load_asked > MAX_WAIT_S:
            self.give_up(sequence)
            return True
        reusable = sequence.tokens[: sequence.exact_limit]
        if self._cache.demand(sequence.key, sequence.namespace, reusable) is Readiness.READY:
            return True
        if sequence.load_asked is None:
            sequence.load_asked = time.monotonic()
            self._waited += 1
        return False

    def give_up(self, sequence: RequestSequence) -> None:
        """Stop waiting: use what has been loaded, and compute the rest."""
        sequence.gave_up = True
        self._cache.withdraw(sequence.key)

    def ended(self, sequence: RequestSequence, now: float) -> float:
        """Forget a sequence that was admitted or has ended. Returns the seconds that it waited."""
        waited = 0.0 if sequence.load_asked is None else now - sequence.load_asked
        self._stall_s += waited
        return waited

    def stats(self) -> dict[str, float]:
        """Return how many requests waited for a load, and for how many seconds in all, while others ran."""
        return {"waited": self._waited, "stall_s": self._stall_s}
