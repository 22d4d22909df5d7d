"""Generations of one HTTP call, from the engine to the reader of the answer.

A call that ends early cancels its remaining generations in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Protocol

from kedge.engine.base import Engine, Item, Stream
from kedge.errors import EngineClosed, KedgeError
from kedge.server.threads import Threads
from kedge.types import Completion, FinishReason, GenerateRequest, TokenDelta


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
