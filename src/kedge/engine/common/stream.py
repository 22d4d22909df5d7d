"""What threads hand to others: a request's tokens (see `kedge.engine.base.Stream`), its text as it grows, an answer."""

import codecs
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from kedge.engine.base import Item, Listener, Tokenizer
from kedge.types import Completion, RequestId, TokenDelta

logger = logging.getLogger(__name__)
Tap = Callable[[Item], Item]
"""Called with every item of a stream, on the thread that puts it; the reader gets what it returns. It never raises."""


def settle(answer: Future[Any], question: Callable[[], object]) -> None:
    """Answer a question. Whatever it raises, exit included, is raised where the answer is awaited."""
    try:
        answer.set_result(question())
    except BaseException as error:
        answer.set_exception(error)


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
            while not (self._is_over or self._items.empty()):
                self._tell(listener, self._items.get())
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


class TextStream:
    """The text of one response. `push` returns what became certain; `stopped` is true once a stop string was met."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._known = 0
        """The number of the first tokens whose text is out; those behind them may still change each other's."""
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        """Has the bytes of a character that is not whole yet"""
        self._stop = stop
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        if not self._tokenizer.plain((token,)):
            return ""  # a special token has no text, and may come without end
        self._tokens.append(token)
        if not ((is_whole := self._is_whole(token)) or self._stop):
            return ""  # bytes may come without end as well, and only a stop string has to be found in them
        more = self._more()
        if not self._cut(more) and more and is_whole:
            self._held += more
            self._tokens, self._known = self._tokens[self._known :], len(self._tokens) - self._known
        return self._release(len(self._held) - (0 if self.stopped else self._maybe_stop()))

    def flush(self) -> str:
        """Return everything that is still held back: nothing at a second call."""
        if not self.stopped and not self._cut(more := self._more()):
            self._held, self._known = self._held + more, len(self._tokens)
        return self._release(len(self._held))

    def _more(self) -> str:
        """Return the text that the tokens behind the known ones add.

        The known tokens are decoded with them: what a token adds depends on whether it is the first one.
        """
        before = self._tokenizer.decode(tuple(self._tokens[: self._known]))
        return self._tokenizer.decode(tuple(self._tokens))[len(before) :]

    def _is_whole(self, token: int) -> bool:
        """Return whether no later token can change the text up to this one, which ends no character midway. That it
        ends with U+FFFD does not tell: a model may write that, and without end.
        """
        if not self._tokenizer.is_certain(token):
            return False
        self._bytes.decode(self._tokenizer.token_bytes(token))
        return not self._bytes.getstate()[0]

    def _cut(self, more: str) -> bool:
        """Return whether there is a stop string once `more` is added. The text then ends before it."""
        text = self._held + more
        hits = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if hits:
            self.stopped, self._held = True, text[: min(hits)]
        return self.stopped

    def _release(self, size: int) -> str:
        out, self._held = self._held[:size], self._held[size:]
        self.text += out
        return out

    def _maybe_stop(self) -> int:
        """Return how many characters at the end could be the beginning of a stop string."""
        sizes = (
            size
            for stop in self._stop
            for size in range(min(len(stop) - 1, len(self._held)), 0, -1)
            if self._held.endswith(stop[:size])
        )
        return max(sizes, default=0)
