"""Log-probabilities as OpenAI's two kinds of completion write them."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from kedge.engine.base import Tokenizer
from kedge.types import TokenLogprob, Tokens

MOST = 20
"""Of the likeliest tokens in one place."""
_IMPOSSIBLE = -9999.0
"""What is written for minus infinity, which JSON has no number for."""


def of_chat(tokenizer: Tokenizer, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    """The field `logprobs` of a chat's choice."""
    return {"content": [_entry(tokenizer, one) for one in entries], "refusal": None}


def _entry(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, Any]:
    likeliest = [_token(tokenizer, token, logprob) for token, logprob in entry.top]
    return {**_token(tokenizer, entry.token, entry.logprob), "top_logprobs": likeliest}


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    spelled = tokenizer.token_bytes(token)
    return {"token": spelled.decode("utf-8", "replace"), "logprob": _number(logprob), "bytes": list(spelled)}


def _number(logprob: float) -> float:
    return max(logprob, _IMPOSSIBLE)


class TextLogprobs:
    """Writes the field `logprobs` of a text completion's choice, piece by piece: offsets go on from piece to piece.

    The text is that of the tokens with specials spelled out.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        """`offset` in characters of the first token."""
        self._tokenizer, self._offset = tokenizer, offset
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, tokens: Tokens, entries: Sequence[TokenLogprob | None]) -> dict[str, list[Any]]:
        """An entry that is None says nothing of its token."""
        return {
            "tokens": [self._text(token) for token in tokens],
            "token_logprobs": [entry and _number(entry.logprob) for entry in entries],
            "top_logprobs": [entry and self._top(entry) for entry in entries],
            "text_offset": [self._next_offset(token) for token in tokens],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """By text, likeliest first; the token itself is always there. Of two that read the same, the likelier one."""
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            top.setdefault(self._text(token), _number(logprob))
        return top

    def _text(self, token: int) -> str:
        spelled = self._tokenizer.token_bytes(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:  # OpenAI's way to write a part of a character
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def _next_offset(self, token: int) -> int:
        at = self._offset
        self._offset += len(self._utf8.decode(self._tokenizer.token_bytes(token)))
        return at


def spelled(tokenizer: Tokenizer, tokens: Tokens) -> str:
    """The text of a prompt's tokens, with specials spelled out."""
    return b"".join(map(tokenizer.token_bytes, tokens)).decode("utf-8", "replace")
