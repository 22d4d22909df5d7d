"""Turning token ids into text as they come, holding back what a stop string may still take away."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from kedge.engine.common.tokenizer import HFTokenizer


class TextStream:
    """The text of one response. `push` returns what became certain; `stopped` is true once a stop string was met."""

    def __init__(self, tokenizer: HFTokenizer, stop: Sequence[str]) -> None:
        self._raw = tokenizer.inner.backend_tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stop = stop
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        self._held += self._decoder.step(self._raw, token) or ""
        hits = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if hits:
            self.stopped = True
            self._held = self._held[: min(hits)]
            return self.flush()
        return self._release(len(self._held) - self._maybe_stop())

    def flush(self) -> str:
        """Return everything that is still held back."""
        return self._release(len(self._held))

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
