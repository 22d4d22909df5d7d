"""Logprobs in the formats of OpenAI's chat and text completions."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from kedge.engine.base import Tokenizer
from kedge.types import TokenLogprob, Tokens

MAX_LOGPROBS = 20
"""Largest k of the top-k logprobs of one token."""
_IMPOSSIBLE = -9999.0
"""Stands for minus infinity, which JSON cannot express."""


def of_chat(tokenizer: Tokenizer, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Return the field `logprobs` of a chat's choice."""
    return {"content": [_entry(tokenizer, one) for one in entries], "refusal": None}


def _entry(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, Any]:
    top = [_token(tokenizer, token, logprob) for token, logprob in entry.top]
    return {**_token(tokenizer, entry.token, entry.logprob), "top_logprobs": top}


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    spelled = tokenizer.token_bytes(token)
    return {"token": spelled.decode("utf-8", "replace"), "logprob": _number(logprob), "bytes": list(spelled)}


def _number(logprob: float) -> float:
    return max(logprob, _IMPOSSIBLE)


class TextLogprobs:
    """Writer of the field `logprobs` of a text completion's choice.

    It writes piece by piece; text offsets continue from piece to piece. Special tokens are spelled out.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        """`offset`: position of the first token, in characters."""
        self._tokenizer, self._offset = tokenizer, offset
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, tokens: Tokens, entries: Sequence[TokenLogprob | None]) -> dict[str, list[Any]]:
        """Return the logprobs of the next tokens. An entry is None where a token has no logprob."""
        return {
            "tokens": [self._text(token) for token in tokens],
            "token_logprobs": [entry and _number(entry.logprob) for entry in entries],
            "top_logprobs": [entry and self._top(entry) for entry in entries],
            "text_offset": [self._next_offset(token) for token in tokens],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """Return logprobs by text, highest first, including the token itself. Of equal texts the highest counts."""
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            top.setdefault(self._text(token), _number(logprob))
        return top

    def _text(self, token: int) -> str:
        spelled = self._tokenizer.token_bytes(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:  # a part of a character; the format is OpenAI's
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def _next_offset(self, token: int) -> int:
        at = self._offset
        self._offset += len(self._utf8.decode(self._tokenizer.token_bytes(token)))
        return at


def spelled(tokenizer: Tokenizer, tokens: Tokens) -> str:
    """Return the text of a prompt's tokens, with special tokens spelled out."""
    return b"".join(map(tokenizer.token_bytes, tokens)).decode("utf-8", "replace")
