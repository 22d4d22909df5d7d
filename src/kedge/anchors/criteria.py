"""Criteria: whether a value is shareable, judged from what a pool holds."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kedge.anchors.anchor import KeyBlock
from kedge.anchors.calibration import Calibration
from kedge.anchors.estimators import Match

GAMMA = 0.3
"""Highest entropy of a shareable value as the paper has it"""
MAX_ERROR = 0.35
"""Highest mean predicted error of a shareable value, tuned on the toy models"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a criterion. `reason` says why a value is not shareable; tokens marked in `weak` (bool [tokens],
    CPU) should be computed, in the value and in the prefix segment after it.
    """

    reason: str
    weak: Tensor
    weak_prefix: Tensor
    learnable: bool = True
    """Whether dense prefill of the prompt pays off, if the value is not shareable."""

    @property
    def shareable(self) -> bool:
        """Whether the value may be translated."""
        return not self.reason


class Criterion(Protocol):
    """A rule that judges a value by the anchors that have offsets for the site in question."""

    def lacks(self, tokens: int, block: KeyBlock, calibration: Calibration) -> str:
        """Return why no value of `tokens` tokens can be shareable now, or the empty text."""

    def judge(self, match: Match, calibration: Calibration) -> Verdict:
        """Return the verdict. Called only where `lacks` returns the empty text."""


@dataclass(frozen=True, slots=True)
class Entropy:
    """The criterion of KVCOMM, Eq. 5: a value is not shareable if it is longer than every anchor, or if the entropy of
    its weights over the anchors at least as long, which are all that an `aligned` estimator uses, exceeds gamma · log
    of their number. A single such anchor is not enough.
    """

    gamma: float

    def lacks(self, tokens: int, block: KeyBlock, calibration: Calibration) -> str:  # noqa: ARG002
        return "" if len(block.long_enough(tokens)) > 1 else "only one anchor is as long"

    def judge(self, match: Match, calibration: Calibration) -> Verdict:  # noqa: ARG002
        anchors = match.block.long_enough(len(match.query.tokens))
        share = float(torch.special.entr(match.proposal.mass).sum()) / math.log(len(anchors))
        reason = f"entropy is {share:.2f} of its maximum, above {self.gamma:g}" if share > self.gamma else ""
        return Verdict(reason, torch.zeros(len(match.query.tokens), dtype=torch.bool), torch.zeros(0, dtype=torch.bool))


@dataclass(frozen=True, slots=True)
class Error:
    """A criterion by which a value is shareable, given enough anchors, if the mean predicted relative error of its
    offsets is small without its weak tokens, which are computed.

    Until twice as many values were observed as sharing needs, weak tokens count as well, since there is something to
    learn. After that an unshareable value is computed and the rest of its prompt translated; a few such values are
    still learned from, so that the site follows changes.
    """

    min_anchors: int
    max_error: float
    weak_error: float
    of_templates: float = 1.4
    """How much an error of the template counts, compared with one of an agent's answer: most of it is read last"""
    still: int = 64
    """One unshareable value in this many still teaches a site that has seen enough of them"""

    def lacks(self, tokens: int, block: KeyBlock, calibration: Calibration) -> str:  # noqa: ARG002
        if len(block.ids) < self.min_anchors:
            return f"{len(block.ids)} anchors of {self.min_anchors}"
        return "" if calibration.observations else "not calibrated yet"

    def judge(self, match: Match, calibration: Calibration) -> Verdict:
        error = calibration.predict(match.proposal.distance)
        weak = error > self.weak_error / match.weight
        learns = calibration.observations < 2 * self.min_anchors
        mean = float((error if learns or weak.all() else error[~weak]).mean())
        reason = f"predicted error is {mean:.2f}, above {self.max_error:g}" if not mean <= self.max_error else ""
        # By its tokens, so that every rank and every agent who reads it decides alike.
        learnable = learns or hash(match.query.tokens) % self.still == 0
        return Verdict(reason, weak, calibration.prefix_error > self.weak_error / self.of_templates, learnable)
