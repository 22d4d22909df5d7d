"""Lanes: several holes of one prompt in one pass of an engine that computes a prompt only from a position on.

The request itself computes its last hole. Every earlier one is a *lane*: a row of the batch of its own, over the same
KV. A lane takes its tokens and its row from what running requests, and requests served earlier, leave over in a step.
So lanes slow no other request down, and are granted in the order of service.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kedge.reuse.costs import PATIENCE
from kedge.reuse.holes import Holes, merged_to


class LaneBudget(NamedTuple):
    """Tokens and rows of one step that lanes may take."""

    tokens: int
    rows: int

    def less(self, tokens: int, rows: int) -> LaneBudget:
        """Return what is left after so many are taken; it may be negative."""
        return LaneBudget(self.tokens - tokens, self.rows - rows)

    def taken_by(self, holes: Holes) -> LaneBudget:
        """Return what is left after the lanes of these holes."""
        return self.less(lane_tokens(holes), max(0, len(holes) - 1))


@dataclass(frozen=True, slots=True)
class WaitingPrompt:
    """A prompt that waits for its admission."""

    key: str
    tokens: int
    """Most tokens that it computes, if it needs no lanes"""
    holes: Holes = ()
    """The holes that it has to compute, if its verdict is known"""
    refusals: int = 0
    """Steps in which it was held back"""


def lane_tokens(holes: Holes) -> int:
    """Return the number of tokens that the lanes of a prompt compute: in all holes but the last."""
    return sum(map(len, holes[:-1]))


def fits(holes: Holes, budget: LaneBudget) -> bool:
    """Return whether there is room for the lanes of a prompt. One hole needs no lane."""
    return len(holes) <= 1 or min(budget.taken_by(holes)) >= 0


def fitted(holes: Holes, budget: LaneBudget) -> Holes:
    """Return holes that fit and contain the given ones.

    Where rows or tokens are short, everything from some hole on is computed, and of the holes before it the nearest
    neighbours become one: with the fewest tokens to compute. O(n² log n) with n holes, O(1) where all fit.
    """
    if fits(holes, budget):
        return holes
    plans = (_cut(holes, kept, budget.rows) for kept in range(len(holes)))
    return min((plan for plan in plans if fits(plan, budget)), key=lambda plan: sum(map(len, plan)))


def _cut(holes: Holes, kept: int, rows: int) -> Holes:
    """Compute everything from a hole on, after the first `kept` in at most `rows` lanes (at least one)."""
    lanes = merged_to(holes[:kept], rows) if kept else ()
    return (*lanes, range(holes[kept].start, holes[-1].stop))


def grant(waiting: Iterable[WaitingPrompt], budget: LaneBudget, demand: int) -> dict[str, Holes]:
    """Return the holes to be computed of those waiting prompts that may be admitted in this step, by their keys.

    `waiting` is in the order of service. `budget` is what a step has beside one token and one row for every running
    request; `demand` is how many more tokens these take in this step. A plan that does not even fit into `budget` is
    cut, for no later step has more while the same requests run; one that does not fit into what is left now waits, and
    so do all after it, for `PATIENCE` steps at most.
    """
    granted: dict[str, Holes] = {}
    left = budget.less(demand, 0)
    for prompt in waiting:
        budget, left = budget.less(1, 1), left.less(1, 1)
        if left.rows < 0:
            break
        own = prompt.tokens
        if len(prompt.holes) > 1:
            holes = fitted(prompt.holes, left if prompt.refusals >= PATIENCE else budget)
            if not fits(holes, left):
                break
            granted[prompt.key], left, own = holes, left.taken_by(holes), len(holes[-1])
        left = left.less(own - 1, 0)
    return granted
