"""Comparing an answer with the one to the same prompt whose KV came from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kedge.decisions import first_decision, pick_of
from kedge.guard import DecisionKind
from kedge.types import Completion, TokenLogprob

TOP = 20
"""Most likely tokens of each position whose probabilities are compared"""
FLOOR = 1e-9
"""Least probability of what is not among them"""
BEGINNING = 1024
"""Most characters of an answer's beginning that are read for its first call"""
MAX_KL = -math.log(FLOOR)
"""Largest divergence, also that from what is not a number"""


@dataclass(frozen=True, slots=True)
class WordingComparison:
    """The first tokens of a translated answer beside those of dense prefill."""

    changed: bool
    """Whether dense prefill clearly prefers another token at the first position where they part"""
    at: int | None
    """That position in the answer, counted from 0; None where none was found"""
    kl: float
    """Largest divergence of the compared positions' distributions, dense from translated, in nats"""


@dataclass(frozen=True, slots=True)
class DecisionComparison:
    """The decisions of a translated answer beside those of dense prefill."""

    changes: Mapping[DecisionKind, bool]
    """Of each kind that was compared, whether it differs"""
    kl: float
    """Largest divergence of the compared tokens' distributions, dense from translated, in nats"""

    @property
    def changed(self) -> bool:
        """Whether the answer decides something else: by another call or another pick and, where nothing is picked, by
        what it begins with. Other words with the same pick do not count.
        """
        decisive = set(self.changes) - ({DecisionKind.WORDING} if DecisionKind.PICK in self.changes else set())
        return any(self.changes[kind] for kind in decisive)


@dataclass(frozen=True, slots=True)
class AnswerDecisions:
    """The decisions in the text of one answer."""

    beginning: str
    """The text as far as another answer's beginning is compared with it"""
    pick: str | None = None
    """None where nothing is picked, or where it is not known"""

    @classmethod
    def of(cls, answer: str, pick: str, *, is_whole: bool) -> AnswerDecisions:
        """Read an answer in which `pick` stands before a pick ("": unknown); picks are read in a whole answer only."""
        return cls(answer[:BEGINNING], pick_of(answer, pick) if pick and is_whole else None)


def compare_decisions(dense: AnswerDecisions, translated: AnswerDecisions, cut: int | None) -> dict[DecisionKind, bool]:
    """Return of each kind of decision that two answers have whether it differs; `cut` is the number of characters
    after which one of them was cut off, None where neither was.
    """
    calls = {first_decision(one.beginning[:cut]) for one in (dense, translated)}
    changes = {DecisionKind.CALL: len(calls) > 1}
    if dense.pick is not None or translated.pick is not None:
        changes[DecisionKind.PICK] = dense.pick != translated.pick
    return changes


def compare_wording(
    dense: Completion, translated: Completion, margin: float, *, sampled: bool = False
) -> WordingComparison | None:
    """Compare two answers with log-probabilities of at least `TOP` tokens up to where they part: whether dense prefill
    holds its own token at least `margin` times as likely there as the other one.

    They part where their tokens differ. Where one of them was `sampled`, the most likely tokens are compared instead,
    as far as both drew the same ones. None where nothing can be compared, or where dense prefill gave no numbers.
    """
    kl = 0.0
    pairs = list(zip(dense.logprobs, translated.logprobs, strict=False))
    for at, (ours, theirs) in enumerate(pairs):
        if not _has_numbers(ours):
            return None
        if not _has_numbers(theirs):
            return WordingComparison(True, at, MAX_KL)
        kl = max(kl, divergence(ours, theirs))
        # What greedy decoding chose, a grammar may have kept from the most likely token.
        best, other = (one.top[0][0] if sampled else one.token for one in (ours, theirs))
        if best != other and _logprob(ours, best) - _logprob(ours, other) >= math.log(margin):
            return WordingComparison(True, at, kl)
        if ours.token != theirs.token:
            return WordingComparison(False, at, kl)
    return WordingComparison(False, None, kl) if pairs else None


def _has_numbers(position: TokenLogprob) -> bool:
    return bool(position.top) and not any(math.isnan(one) for _, one in ((0, position.logprob), *position.top))


def _logprob(position: TokenLogprob, token: int) -> float:
    """Return a token's log-probability, at least that of `FLOOR`."""
    known = (*position.top, (position.token, position.logprob))
    return max(math.log(FLOOR), next((logprob for one, logprob in known if one == token), -math.inf))


def divergence(dense: TokenLogprob, translated: TokenLogprob) -> float:
    """Return KL(dense || translated) over dense prefill's most likely tokens, with all others as one."""
    p = [max(math.log(FLOOR), logprob) for _, logprob in dense.top]
    q = [_logprob(translated, token) for token, _ in dense.top]
    rest_p, rest_q = _rest(p), _rest(q)
    known = sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
    return max(0.0, known + rest_p * (math.log(rest_p) - math.log(rest_q)))


def _rest(logprobs: Sequence[float]) -> float:
    return max(FLOOR, 1.0 - sum(map(math.exp, logprobs)))
