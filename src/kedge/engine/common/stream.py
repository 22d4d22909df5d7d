"""The stream of tokens that engines hand out, see `kedge.engine.base.Stream`."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator

from kedge.engine.base import Item, Listener
from kedge.types import Completion, RequestId, TokenDelta

logger = logging.getLogger(__name__)
Tap = Callable[[Item], Item]
"""Called with every item of a stream, on the thread that puts it; the reader gets what it returns. It never raises."""


class TokenStream:
    """A queue between an engine's thread, which puts deltas and then a completion or an error, and one reader."""

    tap: Tap | None = None

    def __init__(self, request_id: RequestId, on_end: Callable[[RequestId], object] = lambda _: None) -> None:
        """Create an empty stream. `on_end` is called when its end is put, before a reader can see it."""
        self.request_id = request_id
        self._on_end = on_end
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._completion: Completion | None = None
        self._listener: Listener | None = None
        self._handing_over, self._is_over = threading.Lock(), False

    def put(self, item: Item) -> None:
        """Add the next item."""
        item = self.tap(item) if self.tap else item
        if self._ends(item):
            self._on_end(self.request_id)
        with self._handing_over:
            if self._listener is not None:
                self._tell(self._listener, item)
            else:
                self._items.put(item)

    def listen(self, listener: Listener) -> None:
        """Pass everything to `listener`: what has come at once, the rest on the thread that puts it."""
        with self._handing_over:  # so that nothing overtakes what has come before
            while not self._items.empty():
                self._tell(listener, self._items.get())
                if self._is_over:
                    break
            self._listener = listener

    def _tell(self, listener: Listener, item: Item) -> None:
        """Pass an item on. The last one is kept for `result`."""
        if self._ends(item):
            self._is_over = True
            self._items.put(item)
        try:
            listener(item)
        except BaseException:  # its thread has others' streams to go on with
            logger.exception("what listens to request %s failed", self.request_id)

    @staticmethod
    def _ends(item: Item) -> bool:
        return isinstance(item, BaseException) or item.completion is not None

    def __iter__(self) -> Iterator[TokenDelta]:
        while self._completion is None:
            yield self._next(None)

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end. Raises the request's error, or `TimeoutError`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._completion is None:
            self._next(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return self._completion

    def _next(self, timeout: float | None) -> TokenDelta:
        try:
            item = self._items.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no token of {self.request_id} in time") from None
        if self._ends(item):
            self._items.put(item)  # for whoever waits as well, or asks again
        if isinstance(item, BaseException):
            raise item
        self._completion = item.completion
        return item
