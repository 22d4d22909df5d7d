"""The bytes of single tokens. A tokenizer's own `decode` shows half a character as U+FFFD."""

from __future__ import annotations

import json
import re

from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

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
