"""The thread that owns an engine's core: it runs commands and steps, and ends in order whatever happens to it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from kedge.engine.local.core import EngineCore
from kedge.engine.validation import require_new_id
from kedge.errors import EngineClosed, Overloaded
from kedge.types import RequestId

logger = logging.getLogger(__name__)
Command = Callable[[], None]
T = TypeVar("T")
LEARNING_DELAY = 0.02
"""Seconds that an idle engine waits before it learns, since a workflow's next agent comes within milliseconds."""
MAX_FAILURES = 3
"""Consecutive failed steps after which the engine's thread ends."""
MAX_COPY_WAIT = 0.05
"""Longest wait for a copy, in seconds, before the clock is checked again."""


class Mailbox:
    """The queue of commands from any thread, in order of posting, and the ids of the requests in flight."""

    def __init__(self, max_in_flight: int) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._in_flight: set[RequestId] = set()
        self._max_in_flight = max_in_flight
        self.failure: BaseException | None = None
        """The error that ended the engine's thread; None while it works, and after a `close` of a working engine."""

    @property
    def closed(self) -> bool:
        """Whether it takes no more commands."""
        return self._closed.is_set()

    def wake(self) -> None:
        """Wake the engine's thread, even if closed."""
        self._commands.put(lambda: None)

    def enter(self, request_id: RequestId, command: Command) -> None:
        """Post a request's command, and keep its id in flight until `leave`.

        Raises `RequestError` for an id that is in flight already, `Overloaded`, or `EngineClosed`.
        """
        with self._lock:
            self._refuse_closed()
            require_new_id(request_id, self._in_flight)
            if len(self._in_flight) >= self._max_in_flight:
                raise Overloaded("max_waiting", self._max_in_flight, "so many requests are in flight")
            self._in_flight.add(request_id)
            self._commands.put(command)

    def leave(self, request_id: RequestId) -> None:
        """Remove a request's id from those in flight."""
        self._in_flight.discard(request_id)

    def post(self, command: Command) -> None:
        """Post a command. Raises `EngineClosed`."""
        with self._lock:  # so that nothing is put after the thread's last look
            self._refuse_closed()
            self._commands.put(command)

    def ask(self, question: Callable[[], T]) -> T:
        """Run a question on the engine's thread and return its answer. Raises what it raises, or `EngineClosed`."""
        answer: Future[T] = Future()
        self.post(partial(_settle, answer, question))
        return answer.result()

    def close(self) -> None:
        """Refuse further commands, and wake the engine's thread."""
        with self._lock:
            self._closed.set()
            self.wake()

    def drain(self, wait: float | None = 0.0) -> bool:
        """Run the queued commands, waiting up to `wait` seconds (None: for ever) for a first one.

        Returns whether there was one. Called by the engine's thread only.
        """
        try:
            command = self._commands.get(timeout=wait) if wait != 0.0 else self._commands.get_nowait()
        except queue.Empty:
            return False
        _obey(command)
        while not self._commands.empty():
            _obey(self._commands.get())
        return True

    def _refuse_closed(self) -> None:
        if self.closed:
            raise EngineClosed("engine", self.failure, "it was closed, or its thread has died")


class EngineThread:
    """The engine's thread: it runs a core until the mailbox is closed or `MAX_FAILURES` steps in a row have failed."""

    def __init__(self, core: EngineCore, mailbox: Mailbox) -> None:
        self._core, self._mailbox = core, mailbox
        self._failures = 0
        self._idle_waiters: list[threading.Event] = []
        self._thread = threading.Thread(target=self._serve, name="kedge-engine", daemon=True)
        self._thread.start()

    def wait_idle(self, timeout: float) -> bool:
        """Wait until no work is left. Returns False if some is after `timeout` seconds. Any other thread may call."""
        waiter = threading.Event()
        self._mailbox.post(partial(self._idle_waiters.append, waiter))
        return waiter.wait(timeout)

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _serve(self) -> None:
        try:
            while not self._mailbox.closed:
                self._guarded_step()
        except BaseException as error:  # the thread ends here, and must leave no one waiting
            self._mailbox.failure = error
            logger.critical("the engine's thread ends", exc_info=error)
        finally:
            self._mailbox.close()
            self._mailbox.drain()
            self._shut()

    def _guarded_step(self) -> None:
        """Run a step; after an error of the engine itself continue without what ran in it, unless `MAX_FAILURES` steps
        in a row failed.
        """
        try:
            self._next_step()
            self._failures = 0
        except Exception as error:
            self._failures += 1
            if self._failures >= MAX_FAILURES:
                raise
            logger.exception("a step of the engine failed; what ran in it ends")
            self._core.recover(error)

    def _shut(self) -> None:
        """End every stream, whatever the state of the core."""
        while self._idle_waiters:
            self._idle_waiters.pop().set()
        try:
            self._core.shut(self._mailbox.failure)
        except Exception as error:
            logger.exception("the engine could not be shut in order")
            self._core.requests.fail_streams(EngineClosed("engine", error, "its thread has died"))

    def _next_step(self) -> None:
        if not self._core.idle:
            self._mailbox.drain()
            if not self._core.step():
                self._mailbox.drain(wait=MAX_COPY_WAIT)
            return
        self._core.pump()
        if self._core.can_learn:
            if not self._mailbox.drain(wait=0.0 if self._idle_waiters else LEARNING_DELAY):
                self._core.learn()
        elif self._core.transferring:
            self._mailbox.drain(wait=MAX_COPY_WAIT)
        else:
            while self._idle_waiters:
                self._idle_waiters.pop().set()
            self._mailbox.drain(wait=None)


def _obey(command: Command) -> None:
    """Run a command, and contain what it raises."""
    try:
        command()
    except Exception:
        logger.exception("a command to the engine failed: %r", command)


def _settle(answer: Future[T], question: Callable[[], T]) -> None:
    try:
        answer.set_result(question())
    except Exception as error:  # the asker's, whatever it is
        answer.set_exception(error)
