"""Comparing an answer with the one to the same prompt whose KV came from elsewhere."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Self

from kedge.decisions import first_decision, pick_of
from kedge.guard import DecisionKind
from kedge.types import Completion, TokenLogprob

COMPARED_TOKENS = 32
"""First tokens of an answer that are compared, a bound on what a check costs"""
TOP = 20
"""Most likely tokens of each position whose probabilities are compared"""
FLOOR = 1e-9
"""Least probability of all other tokens together"""
BEGINNING = 1024
"""Most characters of an answer's beginning that are read for its first call"""
LEAST = math.log(FLOOR)
MAX_KL = -LEAST
"""Largest divergence, also that from what is not a number"""


@dataclass(frozen=True, slots=True)
class DecisionComparison:
    """The decisions of a translated answer beside dense prefill's."""

    changes: Mapping[DecisionKind, bool]
    """Of each kind that was compared, whether it differs"""
    kl: float
    """Mean divergence of the compared tokens' distributions, translated from dense, in nats"""

    @property
    def changed(self) -> bool:
        """Whether the answer decides something else, by another call or another pick, or is far off."""
        return any(self.changes.values())


@dataclass(frozen=True, slots=True)
class AnswerDecisions:
    """The decisions in the text of one answer."""

    beginning: str
    """The text as far as another answer's beginning is compared with it"""
    pick: str | None = None
    """None where nothing is picked, or where it is not known"""

    @classmethod
    def of(cls, answer: str, pick: str, *, is_whole: bool) -> Self:
        """Read an answer in which `pick` stands before a pick ("": unknown); picks are read in a whole answer only."""
        return cls(answer[:BEGINNING], pick_of(answer, pick) if pick and is_whole else None)


def compare_decisions(dense: AnswerDecisions, translated: AnswerDecisions, cut: int | None) -> dict[DecisionKind, bool]:
    """Return by kind whether the decisions of two answers differ. `cut` is the number of characters after which one of
    them was cut off, None where neither was.
    """
    calls = {first_decision(one.beginning[:cut]) for one in (dense, translated)}
    changes = {DecisionKind.CALL: len(calls) > 1}
    if dense.pick is not None or translated.pick is not None:
        changes[DecisionKind.PICK] = dense.pick != translated.pick
    return changes


def mean_divergence(dense: Completion, translated: Completion) -> float | None:
    """Return the mean divergence of two answers' distributions, up to where their tokens part, in nats a token.

    None where nothing can be compared, or where dense prefill gave no numbers.
    """
    found = list[float]()
    for ours, theirs in zip(dense.logprobs, translated.logprobs, strict=False):
        if not _has_numbers(ours):
            return None
        if not _has_numbers(theirs):
            return MAX_KL
        found.append(divergence(ours, theirs))
        if ours.token != theirs.token:
            break
    return fmean(found) if found else None


def _has_numbers(position: TokenLogprob) -> bool:
    return bool(position.top) and not any(math.isnan(one) for _, one in ((0, position.logprob), *position.top))


def divergence(dense: TokenLogprob, translated: TokenLogprob) -> float:
    """Return a lower bound of KL(dense || translated): over the tokens whose probability is known on both sides, with
    all others as one. A token that only dense prefill lists is at most as likely, translated, as the least likely one
    listed there. Where its share of all others would be more than that, it counts by itself.
    """
    p, q = (dict((*one.top, (one.token, one.logprob))) for one in (dense, translated))
    both = [(max(LEAST, p[token]), max(LEAST, q[token])) for token in p.keys() & q.keys()]
    rests = [max(FLOOR, 1.0 - sum(map(math.exp, one))) for one in zip(*both, strict=True)]
    rest_p, rest_q = rests or (1.0, 1.0)
    most = max(LEAST, min((logprob for _, logprob in translated.top), default=0.0))
    for logprob in sorted((max(LEAST, p[token]) for token in p.keys() - q.keys()), reverse=True):
        if logprob + math.log(rest_q / rest_p) <= most:
            break
        both.append((logprob, most))
        rest_p, rest_q = max(FLOOR, rest_p - math.exp(logprob)), max(FLOOR, rest_q - math.exp(most))
    known = sum(math.exp(ours) * (ours - theirs) for ours, theirs in both)
    return max(0.0, known + rest_p * (math.log(rest_p) - math.log(rest_q)))
