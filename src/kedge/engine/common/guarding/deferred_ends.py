"""Ends of runs that wait until no check needs what the run shared."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable

from kedge.errors import EngineClosed
from kedge.types import RunKey

logger = logging.getLogger(__name__)
End = Callable[[], None]


class DeferredEnds:
    """The runs that checks need, and the ends that wait for these checks. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holds: Counter[RunKey] = Counter()
        self._ends: dict[RunKey, End] = {}

    def hold(self, run: RunKey | None) -> None:
        """Note that one more check needs a run; None: it needs none."""
        if run is not None:
            with self._lock:
                self._holds[run] += 1

    def release(self, run: RunKey | None) -> None:
        """Note that a check is over. The last one of a run carries out its end."""
        if run is None:
            return
        with self._lock:
            self._holds[run] -= 1
            is_free = self._holds[run] <= 0
            if is_free:
                del self._holds[run]
            end = self._ends.pop(run, None) if is_free else None
        _carry_out(end)

    def end(self, run: RunKey, end: End) -> None:
        """Call `end` as soon as no check needs the run, usually at once. Raises what it raises then."""
        with self._lock:
            if is_held := run in self._holds:
                self._ends[run] = end
        if not is_held:
            end()

    def take(self, run: RunKey) -> bool:
        """Carry out an end that waits, at once. Returns whether there was one."""
        with self._lock:
            end = self._ends.pop(run, None)
        _carry_out(end)
        return end is not None

    def close(self) -> None:
        """Carry out all ends that wait."""
        with self._lock:
            ends, self._ends = list(self._ends.values()), {}
            self._holds.clear()
        for end in ends:
            _carry_out(end)


def _carry_out(end: End | None) -> None:
    try:
        if end is not None:
            end()
    except EngineClosed:
        pass  # with all that any run shared
    except Exception:  # the thread that ends a check is not the one that asked for it
        logger.exception("a run could not be ended after its checks")
