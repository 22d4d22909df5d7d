"""Thread pools of a server, and the path from the engine's threads to the event loop."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from kedge.engine.base import Engine, Item, Listener, Stream
from kedge.errors import EngineClosed
from kedge.types import RequestId

WORK_THREADS = 4
"""Threads for work of milliseconds: tokenizing, submitting; and to wait for the engine while runs have all others."""
T = TypeVar("T")


def in_own_thread(task: Callable[[], object], name: str) -> asyncio.Future[None]:
    """Run a task that may hang, in a thread that no end of the process waits for. Returns its end."""
    ended: Future[None] = Future()

    def call() -> None:
        try:
            task()
        finally:
            ended.set_result(None)

    threading.Thread(target=call, name=name, daemon=True).start()
    return asyncio.wrap_future(ended)


class Threads:
    """Thread pools of a server: a few threads for short work, and many for what waits for the engine's next step.

    An engine's thread puts tokens into a queue, which wakes the event loop once per batch instead of once per token.
    """

    def __init__(self, engine: Engine, max_in_flight: int) -> None:
        self._engine = engine
        self._work = ThreadPoolExecutor(WORK_THREADS, "kedge-work")
        self._wait = ThreadPoolExecutor(max_in_flight + WORK_THREADS, "kedge-wait")
        self._asked: dict[Hashable, Future[Any]] = {}
        self._items: deque[tuple[Listener, Item]] = deque()
        self._is_woken = False

    async def work(self, task: Callable[[], T]) -> T:
        """Run a short task off the event loop and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._work, task)

    def wait(self, task: Callable[[], T]) -> Future[T]:
        """Run a task that mostly waits in a thread of its own."""
        return self._wait.submit(task)

    async def ask(self, key: Hashable, question: Callable[[], T]) -> T:
        """Run a task that the engine answers between two steps; who asks the same meanwhile gets the same answer."""
        answer: Future[T] | None = self._asked.get(key)
        if answer is None or answer.done():
            answer = self._asked[key] = self.wait(question)
        return await asyncio.shield(asyncio.wrap_future(answer))

    def follow(self, stream: Stream, take: Listener) -> None:
        """Call `take` on the running event loop with each delta of a stream, in their order, and with its error."""
        stream.listen(partial(self._hear, asyncio.get_running_loop(), take))

    def _hear(self, loop: asyncio.AbstractEventLoop, take: Listener, item: Item) -> None:
        self._items.append((take, item))
        if not self._is_woken:
            self._is_woken = True
            with suppress(RuntimeError):  # the loop is closed, so nothing waits for the item
                loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._is_woken = False  # first, so that an item that comes from now on wakes the loop again
        while self._items:
            take, item = self._items.popleft()
            take(item)

    def cancel(self, requests: Sequence[RequestId]) -> None:
        """Schedule the cancellation of requests in the engine, each of which waits for the end of a step."""

        def cancel(request_id: RequestId) -> None:
            with suppress(EngineClosed):  # it ended with the engine
                self._engine.cancel(request_id)

        for request_id in requests:
            self._wait.submit(cancel, request_id)

    def shut(self, *, wait: bool) -> None:
        """Refuse new tasks and, if asked to, wait for all that run."""
        self._wait.shutdown(wait=wait)
        self._work.shutdown(wait=wait)
