"""What vLLM and the plug-in say of a request, as Kedge tells it: receipts and log-probabilities. Plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from typing import Any, Protocol

from kedge.reuse.plan import ALL_COMPUTED
from kedge.reuse.reasons import with_reasons
from kedge.types import GenerateRequest, Miss, Receipt, ReuseMode, Source, Span, TokenLogprob, Tokens

ORDER = (Source.DEVICE, Source.HOST, Source.TRANSLATED, Source.COMPUTED)
"""Of the parts of a prompt: vLLM accepts a computed prefix only, and the plug-in adds to its end."""
UNTOLD = Miss("*", "the answer ended before vLLM had told where its prompt came from")


class Chance(Protocol):
    """vLLM's `Logprob`."""

    logprob: float
    rank: int | None


def told_receipt(request: GenerateRequest, said: Mapping[str, Any], parts_ms: Mapping[str, float]) -> Receipt:
    """The plug-in's receipt of a request, as ours."""
    counts = [said["tokens"][source.value] for source in ORDER]
    misses = tuple(Miss(one["segment"], one["reason"]) for one in said["misses"])
    if not misses and request.prompt_logprobs is not None and request.reuse is not ReuseMode.OFF:
        misses = (ALL_COMPUTED,)
    spans = _spans(counts)
    return Receipt(request.request_id, request.reuse, spans, with_reasons(request, spans, misses), parts_ms)


def own_receipt(request: GenerateRequest, cached: int | None, parts_ms: Mapping[str, float]) -> Receipt:
    """Where the plug-in's is not there: the answer was ended from outside. vLLM says only how much of the prompt it did
    not compute: `cached` tokens, None where it had not begun. They are exact, or nobody knows."""
    mode, computed = request.reuse, request.prompt_tokens - (cached or 0)
    if cached is None:
        return Receipt(request.request_id, mode, (), parts_ms=parts_ms)
    if cached and mode is ReuseMode.TRANSLATE:
        return Receipt(request.request_id, mode, (), (UNTOLD,), parts_ms)
    spans = _spans([cached, 0, 0, computed])
    return Receipt(request.request_id, mode, spans, with_reasons(request, spans, ()), parts_ms)


def _spans(counts: Iterable[int]) -> tuple[Span, ...]:
    edges = pairwise(accumulate(counts, initial=0))
    return tuple(Span(*edge, source) for edge, source in zip(edges, ORDER, strict=True) if edge[0] < edge[1])


def answer_logprobs(
    tokens: Iterable[int], positions: Iterable[Mapping[int, Chance]], top: int
) -> tuple[TokenLogprob, ...]:
    """Of drawn tokens, each with the `top` likeliest in its place."""
    return tuple(_logprob(token, chances, top) for token, chances in zip(tokens, positions, strict=True))


def prompt_logprobs(
    tokens: Tokens, positions: Iterable[Mapping[int, Chance] | None], top: int
) -> tuple[TokenLogprob | None, ...]:
    """Of a prompt's tokens; None for the first, which nothing comes before."""
    pairs = zip(tokens, positions, strict=True)
    return tuple(None if chances is None else _logprob(token, chances, top) for token, chances in pairs)


def _logprob(token: int, chances: Mapping[int, Chance], top: int) -> TokenLogprob:
    """vLLM gives the token's own besides the likeliest, with its rank (from 1)."""
    ranked = sorted(chances.items(), key=lambda one: one[1].rank or 0)
    likeliest = [(other, chance.logprob) for other, chance in ranked if 1 <= (chance.rank or 0) <= top]
    return TokenLogprob(token, chances[token].logprob, tuple(likeliest))
