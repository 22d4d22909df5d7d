"""What to load: fixed prompts ahead of their agents, and whatever takes less time than computing it (KVFlow, 3.2)."""

import math

from kedge.policies.eviction import StepView, distance

PREFETCH_WINDOW = 2.0
"""Fixed prompts and histories of sessions needed within this many steps are prefetched: the next agent, and the one
behind it"""
PREFETCH_JOBS = 4
"""Prefetches that may be queued or under way, so that what is forecast for later does not delay what is next"""
COPY_JOBS = 2
"""Loads under way from which on requests of vLLM behind the first wait: one is copied while the next is prepared"""
MAX_WAIT_S = 10.0
"""Seconds that a request waits for KV from the host; then it computes what it lacks. A bound for safety: loads pay"""


def is_within(step: float | None, window: float) -> bool:
    """Return whether it is needed within `window` steps (below 0: prefetches are off). None and infinity never are."""
    return step is not None and window >= 0 and step <= window and step < math.inf


def is_awaited(step: float | None) -> bool:
    """Return whether a request waits for KV with this step."""
    return step is not None and step < 0


def may_replace(victim: StepView, step: float, virtual_step: float, probability: float = 1.0) -> bool:
    """Return whether a prefetch for an agent `step` steps away may evict `victim`.

    It may where no agent is known to need the victim again, or where it is needed strictly later; the latter only for
    an agent that is likelier to run then than not, since the victim would have to be loaded again.
    """
    later = distance(victim, virtual_step)
    return later > step and (probability > 1 - probability or later == math.inf)


_WEIGHT = 0.2
"""Share of a new observation in a moving estimate."""


class UnitCost:
    """A moving average of seconds per unit; None until something has been observed."""

    def __init__(self) -> None:
        self.seconds_per_unit: float | None = None

    def observe(self, units: int, seconds: float) -> None:
        """Learn that `units` took `seconds`; zero of either is ignored."""
        if units > 0 and seconds > 0:
            new, old = seconds / units, self.seconds_per_unit
            self.seconds_per_unit = new if old is None else old + _WEIGHT * (new - old)


class CostModel:
    """Measured seconds per loaded block and per computed token."""

    def __init__(self) -> None:
        self.load, self.compute = UnitCost(), UnitCost()

    def computed(self, tokens: int, seconds: float, fade: float = 0.999) -> None:
        """Learn what a pass took, if it had tokens. After each pass loads are assumed to be a little faster. Only loads
        that pay are measured: after a slow one, as on a busy machine, there would never be another.
        """
        self.compute.observe(tokens, seconds)
        if tokens and self.load.seconds_per_unit is not None:
            self.load.seconds_per_unit *= fade

    def load_pays(self, blocks: int, tokens: int, blocks_ahead: int = 0) -> bool:
        """Return whether `blocks`, which wait for `blocks_ahead` others, are loaded before their `tokens` are computed.

        True while one of the two has never been measured: loading leaves the processor to others.
        """
        per_block, per_token = self.load.seconds_per_unit, self.compute.seconds_per_unit
        return per_block is None or per_token is None or (blocks + blocks_ahead) * per_block < tokens * per_token
