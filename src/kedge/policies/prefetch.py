"""Which fixed prompts to prefetch, and what may be evicted for them (KVFlow, section 3.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

from kedge.policies.eviction import StepView, distance

Target = TypeVar("Target")

LIKELY = 0.5
"""An agent's next run is worth a loss where it is more probable than this."""


@dataclass(frozen=True, slots=True)
class Candidate(Generic[Target]):
    """A fixed prompt whose end is not on the device; `node` is that end, or a handle to it."""

    node: Target
    step: float
    probability: float
    size: int
    """Blocks to load."""

    @property
    def order(self) -> tuple[float, ...]:
        """Soonest first, then likeliest, then smallest."""
        return self.step, -self.probability, self.size

    def may_replace(self, victim: StepView, virtual_step: float) -> bool:
        """Return whether it may be loaded in the place of `victim`."""
        return may_replace(victim, self.step, virtual_step, self.probability)


def is_within(step: float | None, window: float) -> bool:
    """Return whether it is needed within `window` steps (below 0: prefetches are off). None and infinity never are."""
    return step is not None and window >= 0 and step <= window and step < math.inf


def is_awaited(step: float | None) -> bool:
    """Return whether a step is that of what a request waits for."""
    return step is not None and step < 0


def may_replace(victim: StepView, step: float, virtual_step: float, probability: float = 1.0) -> bool:
    """Return whether a prefetch for an agent `step` steps away may evict `victim`.

    It may where no agent is known to need the victim again, or where it is needed strictly later; the latter only for
    an agent that is likelier to run then than not, since the victim would have to be loaded again.
    """
    later = distance(victim, virtual_step)
    return later > step and (probability > LIKELY or later == math.inf)
