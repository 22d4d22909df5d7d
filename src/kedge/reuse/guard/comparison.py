"""Comparing an answer with the one to the same prompt whose KV came from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kedge.types import Completion, TokenLogprob

TOP = 20
"""Most likely tokens of each position whose probabilities are compared"""
FLOOR = 1e-9
"""Least probability of what is not among them"""


@dataclass(frozen=True, slots=True)
class DecisionComparison:
    """The first decision of a translated answer beside that of dense prefill."""

    changed: bool
    """Whether dense prefill clearly prefers another token at the first position where they part"""
    at: int | None
    """That position in the answer, counted from 0; None where none was found"""
    kl: float
    """Largest divergence of the compared positions' distributions, dense from translated, in nats"""
    first_kl: float
    """The same of the first token"""


def compare(dense: Completion, translated: Completion, margin: float) -> DecisionComparison:
    """Compare two answers with log-probabilities of at least `TOP` tokens up to where they part.

    They part where the two most likely tokens differ; where the answers were sampled, they are compared as far as both
    drew the same tokens.
    """
    kl, first = 0.0, 0.0
    pairs = list(zip(dense.logprobs, translated.logprobs, strict=False))
    for at, (ours, theirs) in enumerate(pairs):
        kl = max(kl, divergence(ours, theirs))
        first = first if at else kl
        if _prefers(ours, theirs, margin):
            return DecisionComparison(True, at, kl, first)
        if ours.token != theirs.token:
            return DecisionComparison(False, at, kl, first)
    return DecisionComparison(False, None, kl, first)


def _prefers(dense: TokenLogprob, translated: TokenLogprob, margin: float) -> bool:
    """Return whether dense prefill's most likely token is at least `margin` times as likely, by its own
    distribution, as the other's.
    """
    (best, logprob), (other, _) = dense.top[0], translated.top[0]
    return best != other and logprob - _logprob(dense, other) >= math.log(margin)


def _logprob(position: TokenLogprob, token: int) -> float:
    return next((logprob for one, logprob in position.top if one == token), math.log(FLOOR))


def divergence(dense: TokenLogprob, translated: TokenLogprob) -> float:
    """Return KL(dense || translated) over dense prefill's most likely tokens, with all others as one."""
    p = [logprob for _, logprob in dense.top]
    q = [_logprob(translated, token) for token, _ in dense.top]
    rest_p, rest_q = _rest(p), _rest(q)
    known = sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
    return max(0.0, known + rest_p * (math.log(rest_p) - math.log(rest_q)))


def _rest(logprobs: Sequence[float]) -> float:
    return max(FLOOR, 1.0 - sum(map(math.exp, logprobs)))
