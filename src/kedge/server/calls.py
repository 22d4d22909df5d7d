"""One HTTP call's generations, from the engine's threads to the event loop.

A thread for each generation waits for its tokens and posts them to the loop; a call that ends early, for whatever
reason, cancels in the engine what still goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

from kedge.engine.base import Engine, Stream
from kedge.errors import EngineClosed, KedgeError
from kedge.types import Completion, FinishReason, GenerateRequest, RequestId, TokenDelta

logger = logging.getLogger(__name__)
WORKERS = 4
"""Threads for what takes milliseconds: tokenizing, submitting, cancelling."""
T = TypeVar("T")


class Threads:
    """The threads of a server: a few that work, and as many that wait as there may be calls in flight."""

    def __init__(self, engine: Engine, max_in_flight: int) -> None:
        self._engine = engine
        self._work = ThreadPoolExecutor(WORKERS, "kedge-work")
        self._wait = ThreadPoolExecutor(max_in_flight, "kedge-wait")

    async def work(self, task: Callable[[], T]) -> T:
        """Does something short off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._work, task)

    def wait(self, task: Callable[[], T]) -> Future[T]:
        """Does something that mostly waits."""
        return self._wait.submit(task)

    def cancel(self, requests: Sequence[RequestId]) -> None:
        """Cancels requests in the engine, soon."""
        for request_id in requests:
            self._work.submit(self._cancel, request_id)

    def _cancel(self, request_id: RequestId) -> None:
        try:
            self._engine.cancel(request_id)
        except EngineClosed:
            logger.debug("request %s ended with the engine", request_id)

    def shut(self) -> None:
        """Waits for what is under way; nothing new is taken."""
        self._wait.shutdown()
        self._work.shutdown()


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
        self._arrived: asyncio.Queue[tuple[int, TokenDelta] | BaseException] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        for at, stream in enumerate(streams):
            threads.wait(partial(self._follow, at, stream)).add_done_callback(self._post_end)

    # a waiting thread ---------------------------------------------------------------------------------------------

    def _follow(self, at: int, stream: Stream) -> None:
        for delta in stream:
            self._loop.call_soon_threadsafe(self._take, at, delta)

    def _post_end(self, followed: Future[None]) -> None:
        self._loop.call_soon_threadsafe(self._take_end, followed.exception())

    # the event loop -----------------------------------------------------------------------------------------------

    def _take(self, at: int, delta: TokenDelta) -> None:
        if at not in self._begun and delta.tokens:
            self._begun.add(at)
            self._account.begun(at)
        if delta.completion:
            self.completions[at] = delta.completion
            self._account.finished(at, delta.completion)
        self._arrived.put_nowait((at, delta))

    def _take_end(self, error: BaseException | None) -> None:
        self._following -= 1
        if error is not None:
            self._arrived.put_nowait(error)
        if not self._following:
            self._account.over(self)

    async def deltas(self) -> AsyncIterator[tuple[int, TokenDelta]]:
        """Deltas as they come, each with the number of its generation. Raises the first error of any of them, and
        `EngineClosed` where the engine cancelled one."""
        left = len(self._ids)
        while left:
            item = await self._arrived.get()
            if isinstance(item, BaseException):
                raise item
            at, delta = item
            if delta.completion:
                left -= 1
                if delta.completion.finish_reason is FinishReason.CANCELLED:
                    raise EngineClosed("choice", at, "its generation was cancelled")
            yield at, delta

    async def finished(self) -> list[Completion]:
        """All completions. Raises as `deltas` does."""
        async for _ in self.deltas():
            pass
        return [completion for completion in self.completions if completion is not None]

    def fail(self, error: BaseException) -> None:
        """Whoever reads the deltas gets this error next."""
        self._arrived.put_nowait(error)

    def end(self) -> None:
        """Nobody reads on: what still goes on is cancelled. Idempotent."""
        if not self._ended:
            self._ended = True
            self._threads.cancel([name for name, done in zip(self._ids, self.completions, strict=True) if done is None])


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
