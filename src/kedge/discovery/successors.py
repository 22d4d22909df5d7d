"""Who calls after whom, learned from calls as they come: an online model of the step graph (KVFlow, section 3.1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from kedge.structures.bounded import BoundedDict
from kedge.types import AgentId
from kedge.workflow.steps import NextRun

MAX_AGENTS, MAX_SUCCESSORS = 1024, 16
"""Agents, and successors of one of them, that are remembered"""
MEMORY = 32
"""Calls after which old ones count for a third"""
USUAL = 0.5
"""Share of an agent's calls after which texts of its run were read, from which on that is expected"""
LEAST_CALLS, LEAST_SHARE = 2.0, 0.15
"""Calls of an agent, and share of them that went on to another, from which on that is expected again"""
HORIZON, LEAST_ODDS = 16, 0.02
"""Steps that are looked ahead, and probability of a call from which on it is part of a forecast"""
USUAL_GAP = 1.0
"""Seconds from an answer to the next call, until some were observed"""
END = AgentId("")
"""What follows the last agent of a run"""


@dataclass(eq=False, slots=True)
class _After:
    """What followed one agent. Weights lose a share with every call."""

    weights: dict[AgentId, float] = field(default_factory=dict)
    total: float = 0.0
    gap: float = USUAL_GAP
    """Seconds from its answer to the next call, as a moving mean"""
    likely: dict[AgentId, float] | None = None
    """What is expected to follow it, None where that has to be found out again"""
    calls: int = 0
    """Calls of which it is known whether texts of their run were read next"""
    is_read: float = 0.0
    """Share of them after which some were, as a moving mean"""


class Successors:
    """The successors of each agent with their probabilities. One thread owns it."""

    def __init__(self) -> None:
        self._after: BoundedDict[AgentId, _After] = BoundedDict(MAX_AGENTS)

    def observe(self, before: AgentId, after: AgentId, gap: float | None = None) -> None:
        """Take note that `after` (or `END`) called next, `gap` seconds after the answer of `before`."""
        known = self._after.use(before, _After)
        keep = 1 - 1 / MEMORY
        known.weights = {agent: weight * keep for agent, weight in known.weights.items()}
        known.weights[after] = known.weights.get(after, 0.0) + 1
        if len(known.weights) > MAX_SUCCESSORS:
            del known.weights[min(known.weights, key=known.weights.__getitem__)]
        known.total, known.likely = sum(known.weights.values()), None
        if gap is not None:
            known.gap += (gap - known.gap) / min(known.total, MEMORY)

    def followed(self, before: AgentId, *, reads: bool) -> None:
        """Take note of whether the next call after `before` read texts of its run."""
        known = self._after.use(before, _After)
        known.calls = min(known.calls + 1, MEMORY)
        known.is_read += (reads - known.is_read) / known.calls

    def is_read(self, before: AgentId) -> bool:
        """Return whether the next call usually reads texts of the run that an agent has called in."""
        known = self._after.get(before)
        return known is not None and known.is_read >= USUAL

    def probability(self, before: AgentId, after: AgentId) -> float | None:
        """Return how likely `after` calls next; None where too little is known."""
        known = self._after.get(before)
        if known is None or known.total < LEAST_CALLS:
            return None
        return known.weights.get(after, 0.0) / known.total

    def gap(self, before: AgentId) -> float:
        """Return the usual seconds from an agent's answer to the next call."""
        known = self._after.get(before)
        return known.gap if known else USUAL_GAP

    def likely(self, before: AgentId) -> Mapping[AgentId, float]:
        """Return the agents that are expected to call next, with their probabilities."""
        known = self._after.get(before)
        if known is None or known.total < LEAST_CALLS:
            return {}
        if known.likely is None:
            least = LEAST_SHARE * known.total
            often = {agent: weight for agent, weight in known.weights.items() if weight >= least and agent != END}
            known.likely = {agent: weight / known.total for agent, weight in often.items()}
        return known.likely

    def forecast(self, last: AgentId, *, runs: bool) -> dict[AgentId, NextRun]:
        """Return the next runs of all agents that are expected within `HORIZON` steps after `last`, which `runs` now or
        has answered.
        """
        found = {last: NextRun(0.0)} if runs else {}
        queue = deque([(last, 1.0 if runs else 0.0, 1.0)])
        while queue:
            agent, steps, odds = queue.popleft()
            for after, share in self.likely(agent).items() if steps < HORIZON else ():
                if after not in found and odds * share >= LEAST_ODDS:
                    found[after] = NextRun(steps, odds * share)
                    queue.append((after, steps + 1, odds * share))
        return found

    def edges(self) -> list[tuple[AgentId, AgentId, float]]:
        """Return all expected successions with their probabilities."""
        return [(agent, after, share) for agent in self._after for after, share in self.likely(agent).items()]
