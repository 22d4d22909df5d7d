"""Answers with log-probabilities, for tests of the guard."""

import math
from collections.abc import Mapping, Sequence

from kedge.types import Completion, FinishReason, Receipt, RequestId, ReuseMode, Source, Span, TokenLogprob


def position(shares: Mapping[int, float], drawn: int | None = None) -> TokenLogprob:
    """A position with these tokens' probabilities, most likely first; the most likely one is drawn by default."""
    top = tuple((token, math.log(p) if p > 0 else -math.inf) for token, p in shares.items())
    top = tuple(sorted(top, key=lambda entry: -entry[1]))
    token = top[0][0] if drawn is None else drawn
    return TokenLogprob(token, dict(top).get(token, -30.0), top)


def answer(
    *positions: TokenLogprob,
    spans: Sequence[Span] = (Span(0, 10, Source.COMPUTED),),
    finish_reason: FinishReason = FinishReason.LENGTH,
) -> Completion:
    """A completion of these positions."""
    receipt = Receipt(RequestId("r"), ReuseMode.TRANSLATE, tuple(spans))
    tokens = tuple(one.token for one in positions)
    return Completion(RequestId("r"), "", tokens, finish_reason, receipt, 1.0, 2.0, tuple(positions))
