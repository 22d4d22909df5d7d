"""Generations of one HTTP call, from the engine's threads over the event loop to the reader, and their receipts.

An engine's thread puts tokens into an inbox, which wakes the event loop once per batch instead of once per token. A
call that ends early cancels its remaining generations in the engine.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol, TypeVar

from kedge.engine.base import Engine, Item, Listenable, Listener, Stream
from kedge.errors import EngineClosed, KedgeError
from kedge.hints import Hints
from kedge.types import Completion, FinishReason, GenerateRequest, RequestId, Source, TokenDelta

logger = logging.getLogger(__name__)
WORK_THREADS = 4
"""Threads for work of milliseconds: tokenizing, submitting, cancelling."""
T = TypeVar("T")


class Inbox:
    """Queue of items from any thread to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[tuple[Listener, Item]] = deque()
        self._is_woken = False

    def put(self, take: Listener, item: Item) -> None:
        """Call `take` with the item on the event loop, in the order of the items."""
        self._items.append((take, item))
        if not self._is_woken:
            self._is_woken = True
            with suppress(RuntimeError):  # the loop is closed, so nothing waits for the item
                self._loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._is_woken = False  # first, so that an item that comes from now on wakes the loop again
        while self._items:
            take, item = self._items.popleft()
            take(item)


class Threads:
    """Thread pools of a server: a few threads for short work, and one for each call in flight that waits."""

    def __init__(self, engine: Engine, max_in_flight: int) -> None:
        self._engine = engine
        self._work = ThreadPoolExecutor(WORK_THREADS, "kedge-work")
        self._wait = ThreadPoolExecutor(max_in_flight, "kedge-wait")
        self._followed = 0
        self._all_ended = threading.Condition()
        self._inbox: Inbox | None = None

    async def work(self, task: Callable[[], T]) -> T:
        """Run a short task off the event loop and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._work, task)

    def wait(self, task: Callable[[], T]) -> Future[T]:
        """Run a task that mostly waits in a thread of its own."""
        return self._wait.submit(task)

    def follow(self, stream: Stream, take: Listener) -> None:
        """Call `take` on the running event loop with each delta of a stream, and with its error."""
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
        """Schedule the cancellation of requests in the engine."""
        for request_id in requests:
            self._work.submit(self._cancel, request_id)

    def _cancel(self, request_id: RequestId) -> None:
        try:
            self._engine.cancel(request_id)
        except EngineClosed:
            logger.debug("request %s ended with the engine", request_id)

    def shut(self) -> None:
        """Wait for all running tasks and refuse new ones."""
        with self._all_ended:
            self._all_ended.wait_for(lambda: not self._followed)
        self._wait.shutdown()
        self._work.shutdown()


def _read(stream: Stream, hear: Listener) -> None:
    """Pass on all deltas of a stream, or its error."""
    try:
        for delta in stream:
            hear(delta)
    except BaseException as error:  # its reader raises it
        hear(error)


class Account(Protocol):
    """Bookkeeping of a call. Its methods are called on the event loop."""

    def begun(self, at: int) -> None:
        """Record the first token of the generation with number `at`."""

    def finished(self, at: int, completion: Completion) -> None:
        """Record the completion of the generation with number `at`, which may have been cancelled."""

    def over(self, call: GenerationCall) -> None:
        """Record that nothing of the call is left in the engine."""


class GenerationCall:
    """Generations of one HTTP call. Belongs to the event loop."""

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
        """Yield the deltas that have arrived since the last batch, each with the number of its generation.

        Raises the first error of any generation, and `EngineClosed` if the engine cancelled one.
        """
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
        """Return all completions. Raises like `batches`."""
        async for _ in self.batches():
            pass
        return [completion for completion in self.completions if completion is not None]

    def fail(self, error: BaseException) -> None:
        """Raise this error next in the reader of `batches`."""
        self._arrive(error)

    def end(self) -> None:
        """Stop reading: cancel the generations that still run. Idempotent."""
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
    """Submit all requests or, if one is refused, none. Returns the requests with their streams."""
    streams: list[Stream] = []
    try:
        for request in requests:
            streams.append(engine.submit(request))
    except KedgeError:
        for stream in streams:
            engine.cancel(stream.request_id)
        raise
    return requests, streams


def receipt(completion: Completion) -> dict[str, Any]:
    """Return where the prompt's tokens came from, and the timings.

    The engine's request ids are left out: their numbers would reveal how much other tenants ask for.
    """
    found = completion.receipt
    return {
        "mode": found.mode,
        "tokens": {source.value: found.tokens(source) for source in Source},
        "preassembled": found.preassembled,
        "misses": [{"segment": miss.segment, "reason": miss.reason} for miss in found.misses],
        "guard": [asdict(note) for note in found.guard],
        "parts_ms": dict(found.parts_ms),
        "ttft_ms": completion.ttft_ms,
        "total_ms": completion.total_ms,
    }


def kedge_field(hints: Hints, completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the field `kedge` of an answer and of a stream's last chunk: a receipt per choice, the hints, and what
    became of each of the client's actions.
    """
    field = {"receipts": [receipt(completion) for completion in completions], "hints": hints.to_dict()}
    return {**field, "actions": [one.to_dict() for one in hints.actions]} if hints.actions else field


def usage(completions: Sequence[Completion], per_prompt: int) -> dict[str, Any]:
    """Return the token counts of a call.

    A prompt counts once for all of its `per_prompt` choices, with the cached tokens of its first choice.
    """
    receipts = [completion.receipt for completion in completions[::per_prompt]]
    prompt_tokens = sum(one.prompt_tokens for one in receipts)
    completion_tokens = sum(len(completion.tokens) for completion in completions)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(one.exact for one in receipts)},
    }
