"""Receipts and log-probabilities of a request, from the data of vLLM and the plug-in. No vLLM is needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from kedge.reuse.plan import ALL_COMPUTED
from kedge.reuse.reasons import with_reasons
from kedge.types import GenerateRequest, Miss, Receipt, ReuseMode, Source, Span, TokenLogprob, Tokens

NO_RECEIPT = Miss("*", "the request ended before vLLM reported where its prompt came from")


class RankedLogprob(Protocol):
    """vLLM's `Logprob`: of one token in one place, with its rank from 1."""

    logprob: float
    rank: int | None


def plugin_receipt(request: GenerateRequest, data: Mapping[str, Any], parts_ms: Mapping[str, float]) -> Receipt:
    """Return the receipt that the plug-in sent for a request as `data`."""
    misses = tuple(Miss(one["segment"], one["reason"]) for one in data["misses"])
    if not misses and request.prompt_logprobs is not None and request.reuse is not ReuseMode.OFF:
        misses = (ALL_COMPUTED,)
    spans = tuple(Span(start, stop, Source(source)) for start, stop, source in data["spans"])
    reasons = with_reasons(request, spans, misses)
    return Receipt(request.request_id, request.reuse, spans, reasons, parts_ms, data["preassembled"])


def fallback_receipt(request: GenerateRequest, cached: int | None, parts_ms: Mapping[str, float]) -> Receipt:
    """Return the receipt of an aborted request, for which the plug-in sent none.

    vLLM reports only the number of prompt tokens that it did not compute: `cached`, None where it had not begun.
    Whether they are exact is known only where nothing could be translated.
    """
    mode = request.reuse
    if cached is None:
        return Receipt(request.request_id, mode, (), parts_ms=parts_ms)
    if cached and mode is ReuseMode.TRANSLATE:
        return Receipt(request.request_id, mode, (), (NO_RECEIPT,), parts_ms)
    both = Span(0, cached, Source.DEVICE), Span(cached, request.prompt_tokens, Source.COMPUTED)
    spans = tuple(span for span in both if len(span))
    return Receipt(request.request_id, mode, spans, with_reasons(request, spans, ()), parts_ms)


def answer_logprobs(
    tokens: Iterable[int], positions: Iterable[Mapping[int, RankedLogprob]], top: int
) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities of drawn tokens, each with those of the `top` likeliest in its place."""
    return tuple(_logprob(token, ranked, top) for token, ranked in zip(tokens, positions, strict=True))


def prompt_logprobs(
    tokens: Tokens, positions: Iterable[Mapping[int, RankedLogprob] | None], top: int
) -> tuple[TokenLogprob | None, ...]:
    """Return the log-probabilities of a prompt's tokens; None for the first, which has no context."""
    pairs = zip(tokens, positions, strict=True)
    return tuple(None if ranked is None else _logprob(token, ranked, top) for token, ranked in pairs)


def _logprob(token: int, ranked: Mapping[int, RankedLogprob], top: int) -> TokenLogprob:
    """Return a token's own log-probability, which vLLM gives beside the likeliest, and those of the `top` likeliest."""
    by_rank = sorted(ranked.items(), key=lambda one: one[1].rank or 0)
    likeliest = [(other, one.logprob) for other, one in by_rank if 1 <= (one.rank or 0) <= top]
    return TokenLogprob(token, ranked[token].logprob, tuple(likeliest))
