"""A thread that carries out checks one by one: freely while the engine is idle, else within a token budget.

An engine is idle once no request has come for as long as a check takes, so that what such checks delay is at most as
much as was waited for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from kedge.engine.base import Stream
from kedge.engine.common.guarding.check import Check
from kedge.engine.common.guarding.deferred_ends import DeferredEnds
from kedge.errors import KedgeError
from kedge.settings import GuardSettings
from kedge.types import Completion, FinishReason, GenerateRequest, RequestId, RunKey, WorkflowAgent

logger = logging.getLogger(__name__)
GRACE, PATIENCE = 0.02, 5.0
"""Fewest and most seconds without a request after which an engine counts as idle: a workflow's next agent comes within
milliseconds, and what a check took beside many requests says nothing of an idle engine"""
MAX_WAITING = 2
"""Checks of one agent that may wait before no more are prepared: the budget does not pay for them"""
MAX_CREDIT = 16384
"""Most tokens of checks that requests may save up"""


class CheckThread:
    """The checks of one engine, bounded: beyond `max_pending` the oldest one of the agent with the most is dropped.
    Any thread may call.
    """

    def __init__(
        self,
        submit: Callable[[GenerateRequest], Stream],
        judged: Callable[[Check, Completion], None],
        settings: GuardSettings,
    ) -> None:
        """`judged` is called with every check and its answer, on this thread."""
        self._submit, self._judged, self._settings = submit, judged, settings
        self._changed = threading.Condition()
        self._waiting: deque[Check] = deque()
        self._current: Check | None = None
        self._in_flight, self._idle_since, self._credit = 0, time.monotonic(), 0.0
        self._pause = GRACE
        """Seconds without a request after which the engine counts as idle: about as many as the last check took"""
        self._draining, self._closed = 0, False
        self._ends = DeferredEnds()
        self._thread: threading.Thread | None = None
        self.done = self.dropped = 0

    # requests that are served ------------------------------------------------------------------------------------

    def arrived(self) -> None:
        """Note that a request is being served."""
        with self._changed:
            self._in_flight += 1

    def left(self, tokens: int) -> None:
        """Note that a request has ended, for which `tokens` tokens were computed."""
        with self._changed:
            self._in_flight -= 1
            self._idle_since = time.monotonic()
            self._credit = min(MAX_CREDIT, self._credit + self._settings.budget * tokens)
            self._changed.notify_all()

    # checks ------------------------------------------------------------------------------------------------------

    def add(self, check: Check) -> None:
        """Queue a check."""
        with self._changed:
            if self._closed:
                return
            self._waiting.append(check)
            self._ends.hold(check.run)
            dropped = [self._excess()] if len(self._waiting) > self._settings.max_pending else []
            self._drop(dropped)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kedge-guard", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        self._release(dropped)

    def wants(self, agent: WorkflowAgent) -> bool:
        """Return whether another check of an agent would be carried out soon."""
        with self._changed:
            return sum(check.of.workflow_agent == agent for check in self._waiting) < MAX_WAITING

    def _excess(self) -> Check:
        counts = Counter(check.of.workflow_agent for check in self._waiting)
        return max(self._waiting, key=lambda check: counts[check.of.workflow_agent])

    def _drop(self, checks: Sequence[Check]) -> None:
        for check in checks:
            self._waiting.remove(check)
            self.dropped += 1

    def _release(self, checks: Sequence[Check]) -> None:
        for check in checks:
            self._ends.release(check.run)

    def is_under_way(self, request_id: RequestId) -> bool:
        """Return whether a request is the check that is being carried out."""
        current = self._current
        return current is not None and current.request.request_id == request_id

    # runs --------------------------------------------------------------------------------------------------------

    def end_run(self, run: RunKey, end: Callable[[], None]) -> None:
        """Call `end` as soon as no check needs what the run shared, usually at once."""
        self._ends.end(run, end)

    def begin_run(self, run: RunKey) -> None:
        """Note that a request of a run is about to be submitted. If the end of an earlier run with its id still waits,
        that happens now, so that it does not hit the new one, and its checks are dropped.
        """
        if self._ends.take(run):
            with self._changed:
                stale = [check for check in self._waiting if check.run == run]
                self._drop(stale)
                self._changed.notify_all()
            self._release(stale)

    def drain(self, timeout: float) -> bool:
        """Carry out all checks as if the engine were idle. Returns False if some are left after `timeout` seconds."""
        with self._changed:
            self._draining += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: not (self._waiting or self._current), timeout)
            finally:
                self._draining -= 1

    def stop(self) -> None:
        """Drop what waits, and carry out the ends of runs; the check under way ends with its engine."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        self._ends.close()

    def join(self) -> None:
        """Wait for the thread's end, after `stop` and the engine's end."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # its thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (check := self._next()) is not None:
            self._carry_out(check)
            with self._changed:
                self._current = None
                self._changed.notify_all()
            self._ends.release(check.run)

    def _next(self) -> Check | None:
        with self._changed:
            while not self._closed:
                wait = self._seconds_to_wait()
                if wait == 0:
                    self._current = self._waiting.popleft()
                    return self._current
                self._changed.wait(wait)
            return None

    def _seconds_to_wait(self) -> float | None:
        """Return 0 if the first check may start, else the time until it may; None: until something changes."""
        if not self._waiting:
            return None
        if self._draining:
            return 0
        if self._in_flight == 0:
            return max(0.0, self._idle_since + self._pause - time.monotonic())
        if self._credit >= (cost := min(MAX_CREDIT, self._waiting[0].cost)):  # a longer one would wait for ever
            self._credit -= cost
            return 0
        return None

    def _carry_out(self, check: Check) -> None:
        is_done, began = False, time.monotonic()
        try:
            again = self._submit(check.request).result()
            if is_done := again.finish_reason is not FinishReason.CANCELLED:
                self._judged(check, again)
        except KedgeError as error:  # the engine was closed, or has no room for it
            logger.debug("a check was not carried out: %s", error)
        except Exception:  # whatever happens to a check is no request's concern
            is_done = False
            logger.exception("a check failed")
        with self._changed:
            if is_done:  # pauses shorter than a check are a client's between two calls: it would run beside the second
                self._pause = min(max(GRACE, time.monotonic() - began), PATIENCE)
            self.done += is_done
            self.dropped += not is_done
