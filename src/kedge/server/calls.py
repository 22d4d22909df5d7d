"""One HTTP call's generations, from the engine's threads to the event loop.

An engine's thread leaves tokens in an inbox and wakes the event loop once for all that it finds there, not once for
each. A call that ends early, for whatever reason, cancels in the engine what still goes on.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar

from kedge.engine.base import Engine, Item, Listenable, Listener, Stream
from kedge.errors import EngineClosed, KedgeError
from kedge.types import Completion, FinishReason, GenerateRequest, RequestId, TokenDelta

logger = logging.getLogger(__name__)
WORKERS = 4
"""Threads for what takes milliseconds: tokenizing, submitting, cancelling."""
T = TypeVar("T")


class Inbox:
    """Items for the event loop, from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[tuple[Listener, Item]] = deque()
        self._is_woken = False

    def put(self, take: Listener, item: Item) -> None:
        """Call `take` with the item on the event loop, in the order of the items."""
        self._items.append((take, item))
        if not self._is_woken:
            self._is_woken = True
            with suppress(RuntimeError):  # the loop has been closed: nobody waits for the item
                self._loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._is_woken = False  # before the look: what comes from now on wakes the loop again
        while self._items:
            take, item = self._items.popleft()
            take(item)


class Threads:
    """The threads of a server: a few that work, as many that wait as there may be calls in flight, and the way from
    the engine's own threads to the event loop."""

    def __init__(self, engine: Engine, max_in_flight: int) -> None:
        self._engine = engine
        self._work = ThreadPoolExecutor(WORKERS, "kedge-work")
        self._wait = ThreadPoolExecutor(max_in_flight, "kedge-wait")
        self._followed = 0
        self._all_ended = threading.Condition()
        self._inbox: Inbox | None = None

    async def work(self, task: Callable[[], T]) -> T:
        """Do something short off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._work, task)

    def wait(self, task: Callable[[], T]) -> Future[T]:
        """Do something that mostly waits."""
        return self._wait.submit(task)

    def follow(self, stream: Stream, take: Listener) -> None:
        """Call `take` on the running event loop with each delta of a stream, or with its error."""
        if self._inbox is None:
            self._inbox = Inbox(asyncio.get_running_loop())
        with self._all_ended:
            self._followed += 1
        hear = partial(self._hear, self._inbox, take)
        if isinstance(stream, Listenable):
            stream.listen(hear)
        else:
            self._wait.submit(_read, stream, hear)

    def _hear(self, inbox: Inbox, take: Listener, item: Item) -> None:
        inbox.put(take, item)
        if isinstance(item, BaseException) or item.completion:
            with self._all_ended:
                self._followed -= 1
                self._all_ended.notify_all()

    def cancel(self, requests: Sequence[RequestId]) -> None:
        """Cancel requests in the engine, soon."""
        for request_id in requests:
            self._work.submit(self._cancel, request_id)

    def _cancel(self, request_id: RequestId) -> None:
        try:
            self._engine.cancel(request_id)
        except EngineClosed:
            logger.debug("request %s ended with the engine", request_id)

    def shut(self) -> None:
        """Wait for what is under way; nothing new is taken."""
        with self._all_ended:
            self._all_ended.wait_for(lambda: not self._followed)
        self._wait.shutdown()
        self._work.shutdown()


def _read(stream: Stream, hear: Listener) -> None:
    """Wait for all that a stream has to say."""
    try:
        for delta in stream:
            hear(delta)
    except BaseException as error:  # it is its reader's, whatever it is
        hear(error)


class Account(Protocol):
    """Who keeps the books of a call. Called on the event loop."""

    def begun(self, at: int) -> None:
        """Take note that a generation's first token has come; `at` is its number in the call."""

    def finished(self, at: int, completion: Completion) -> None:
        """Take note that a generation has ended with a completion, cancelled ones too."""

    def over(self, call: Call) -> None:
        """Nothing of the call is left in the engine."""


class Call:
    """The generations of one HTTP call. Belongs to the event loop."""

    def __init__(
        self, threads: Threads, requests: Sequence[GenerateRequest], streams: Sequence[Stream], account: Account
    ) -> None:
        self.requests = requests
        self.completions: list[Completion | None] = [None] * len(streams)
        self._threads, self._account, self._ended = threads, account, False
        self._ids = [stream.request_id for stream in streams]
        self._begun: set[int] = set()
        self._following = len(streams)
        self._arrived: list[tuple[int, TokenDelta] | BaseException] = []
        self._has_news = asyncio.Event()
        for at, stream in enumerate(streams):
            threads.follow(stream, partial(self._take, at))

    def _take(self, at: int, item: Item) -> None:
        if isinstance(item, BaseException):
            self._arrive(item)
            return self._end_one()
        if at not in self._begun and item.tokens:
            self._begun.add(at)
            self._account.begun(at)
        if item.completion:
            self.completions[at] = item.completion
            self._account.finished(at, item.completion)
        self._arrive((at, item))
        return self._end_one() if item.completion else None

    def _arrive(self, item: tuple[int, TokenDelta] | BaseException) -> None:
        self._arrived.append(item)
        self._has_news.set()

    def _end_one(self) -> None:
        self._following -= 1
        if not self._following:
            self._account.over(self)

    async def batches(self) -> AsyncIterator[list[tuple[int, TokenDelta]]]:
        """Yield the deltas that have come since the last look, each with the number of its generation. Raises the
        first error of any of them, and `EngineClosed` where the engine cancelled one."""
        left = len(self._ids)
        while left:
            await self._has_news.wait()
            self._has_news.clear()
            arrived, self._arrived = self._arrived, []
            deltas, error = _up_to_error(arrived)
            left -= sum(delta.completion is not None for _, delta in deltas)
            if deltas:
                yield deltas
            if error is not None:
                raise error

    async def finished(self) -> list[Completion]:
        """Return all completions. Raises as `batches` does."""
        async for _ in self.batches():
            pass
        return [completion for completion in self.completions if completion is not None]

    def fail(self, error: BaseException) -> None:
        """Raise this error next in whoever reads the deltas."""
        self._arrive(error)

    def end(self) -> None:
        """Nobody reads on: what still goes on is cancelled. Idempotent."""
        if not self._ended:
            self._ended = True
            self._threads.cancel([name for name, done in zip(self._ids, self.completions, strict=True) if done is None])


def _up_to_error(
    arrived: Sequence[tuple[int, TokenDelta] | BaseException],
) -> tuple[list[tuple[int, TokenDelta]], BaseException | None]:
    deltas: list[tuple[int, TokenDelta]] = []
    for item in arrived:
        if isinstance(item, BaseException):
            return deltas, item
        at, delta = item
        if delta.completion and delta.completion.finish_reason is FinishReason.CANCELLED:
            return deltas, EngineClosed("choice", at, "its generation was cancelled")
        deltas.append(item)
    return deltas, None


def submit_all(
    engine: Engine, requests: Sequence[GenerateRequest]
) -> tuple[Sequence[GenerateRequest], Sequence[Stream]]:
    """Submits all requests or, where one is refused, none. Answers them with their streams."""
    streams: list[Stream] = []
    try:
        for request in requests:
            streams.append(engine.submit(request))
    except KedgeError:
        for stream in streams:
            engine.cancel(stream.request_id)
        raise
    return requests, streams
