"""Prompts and answers of the last calls, where a tenant's may be kept, for looking into a call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from kedge.engine.base import Tokenizer
from kedge.reuse.reasons import pieces
from kedge.server.tenancy import KeyRing
from kedge.settings import ServerSettings
from kedge.types import Completion, GenerateRequest, Segment, Span, TenantId

MAX_TEXT_TOKENS = 1 << 17
"""Of all prompts and answers that are kept of one tenant."""


def text_policy(settings: ServerSettings, keys: KeyRing) -> Callable[[TenantId], bool]:
    """Return a function of the tenant: whether its texts may be kept, by its own setting or else the server's."""
    chosen = {tenant.id: tenant.keep_texts for tenant in keys.tenants if tenant.keep_texts is not None}
    return lambda tenant: chosen.get(tenant, settings.keep_texts)


@dataclass(frozen=True, slots=True)
class CallText:
    """The prompt of a call, by segment and source, and its answer."""

    segments: tuple[Segment, ...]
    spans: tuple[Span, ...]
    answer: str
    tokens: int
    """Of prompt and answer."""

    def to_dict(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Plain data for the page. Decodes the whole prompt, so call it off the event loop."""
        tokens = list(chain.from_iterable(segment.tokens for segment in self.segments))
        prompt = [
            {
                "segment": self.segments[piece.segment].name,
                "source": piece.source,
                "text": _decoded(tokenizer, tokens[piece.start : piece.stop]),
            }
            for piece in pieces(self.segments, self.spans)
        ]
        return {"prompt": prompt, "answer": self.answer}


class CallTexts:
    """Texts by the numbers of their calls; the oldest give way to the newest."""

    def __init__(self, max_tokens: int = MAX_TEXT_TOKENS) -> None:
        self._max_tokens, self._tokens = max_tokens, 0
        self._texts: OrderedDict[int, CallText] = OrderedDict()

    def add(self, number: int, request: GenerateRequest, completion: Completion) -> None:
        """Keep a call's text; one that is longer than all that may be kept is dropped."""
        size = request.prompt_tokens + len(completion.tokens)
        self._texts[number] = CallText(request.segments, completion.receipt.spans, completion.text, size)
        self._tokens += size
        while self._tokens > self._max_tokens:
            _, oldest = self._texts.popitem(last=False)
            self._tokens -= oldest.tokens

    def get(self, number: int) -> CallText | None:
        """Return a call's text; None where it was not kept, or has given way."""
        return self._texts.get(number)


def _decoded(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """Text with special tokens spelled out; a character cut in two becomes a replacement character."""
    return b"".join(map(tokenizer.token_bytes, tokens)).decode("utf-8", "replace")
