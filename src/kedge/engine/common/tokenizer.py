"""Transformers' tokenizers as the `Tokenizer` of the `Engine` contract, with the bytes of single tokens: a tokenizer's
own `decode` shows half a character as U+FFFD. `TextStream` turns token ids into text as they come, holding back what a
stop string may still take away.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kedge.errors import ModelNotFound
from kedge.types import Tokens

_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


class Spelling:
    """A reader of the vocabulary of a byte-level tokenizer, or of one that writes spaces as U+2581 and bytes as
    <0xNN>.
    """

    def __init__(self, raw: Tokenizer) -> None:
        self._raw = raw
        self._added = {token: added.content for token, added in raw.get_added_tokens_decoder().items()}
        self._is_byte_level = raw.decoder is not None and _has_part(json.loads(raw.decoder.__getstate__()), "ByteLevel")

    def __call__(self, token: int) -> bytes:
        """Return the bytes of a token; empty for an id that is not in the vocabulary: models may have more rows than
        tokens.
        """
        if token in self._added:
            return self._added[token].encode()
        text = self._raw.id_to_token(token) or ""
        if self._is_byte_level:
            return bytes(_BYTES[character] for character in text)
        if found := _BYTE.fullmatch(text):
            return bytes.fromhex(found[1])
        return text.replace(_SPACE, " ").encode()


def _has_part(decoder: dict, kind: str) -> bool:
    """Return whether a decoder, given as its state, is of a kind or contains one of that kind."""
    return decoder["type"] == kind or any(_has_part(part, kind) for part in decoder.get("decoders", ()))


class HFTokenizer:
    """A Transformers tokenizer, see `kedge.engine.base.Tokenizer`."""

    def __init__(self, inner: PreTrainedTokenizerBase) -> None:
        self.inner = inner
        self.eos_token_id: int | None = inner.eos_token_id
        self._spelling = Spelling(inner.backend_tokenizer)

    @classmethod
    def load(cls, path: Path) -> HFTokenizer:
        """Return a folder's tokenizer. Raises `ModelNotFound` where there is none that can be read."""
        try:
            return cls(AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False))
        except (OSError, ValueError) as error:
            raise ModelNotFound("tokenizer", str(path), f"cannot be loaded: {error}") from error

    def encode(self, text: str, *, special: bool = True) -> Tokens:
        return tuple(self.inner.encode(text, add_special_tokens=False, split_special_tokens=not special))

    def decode(self, tokens: Tokens) -> str:
        return cast(str, self.inner.decode(list(tokens), skip_special_tokens=True))

    def token_bytes(self, token: int) -> bytes:
        return self._spelling(token)

    def chat(self, system: str | None, user: str) -> str:
        """Render the model's chat template or, where it has none, BOS and the two texts with blank lines between."""
        if self.inner.chat_template is None:
            texts = [text for text in (system, user) if text]
            return (self.inner.bos_token or "") + "\n\n".join(texts) + "\n\n"
        messages = [{"role": "user", "content": user}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        return cast(str, self.inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


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
