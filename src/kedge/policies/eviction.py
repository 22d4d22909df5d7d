"""Who goes first. A policy is a pure key function over a node; the heap that asks it knows nothing of its reasons."""

import math
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from kedge.settings import TierSettings
from kedge.settings.sections import VIRTUAL_STEP

EvictionKey = tuple[float, ...]
Owner = TypeVar("Owner")
NextRuns = Mapping[Owner, tuple[float, float] | None]
"""Who needs KV again -> steps until then (`inf`: unknown) and their probability; None: nothing is known any more"""


class StepView(Protocol):
    """What `lru` and `steps_to_execution` look at: KV that is evicted together."""

    @property
    def last_access(self) -> int:
        """The owner's clock when the KV was last used; grows with every use."""

    @property
    def step(self) -> float | None:
        """Fewest steps until an agent whose fixed prompt passes the KV can run; `inf`: unknown; None: no agent."""

    @property
    def varying(self) -> bool:
        """Whether the KV follows a fixed prompt."""


EvictionPolicy = Callable[[StepView], EvictionKey]
"""Pure: the same KV and outside state give the same key, whose last number is `last_access`. The least key goes first;
in the radix tree, of all unlocked leaves.
"""


def lru(node: StepView) -> EvictionKey:
    """Evict the least recently used first."""
    return (node.last_access,)


def kind_of(kv: StepView) -> str:
    """Return what KV is, as evictions are counted by: "labelled" with a step, "varying" behind a fixed prompt, or
    "unlabelled".
    """
    if kv.step is not None:
        return "labelled"
    return "varying" if kv.varying else "unlabelled"


def distance(node: StepView, virtual_step: float = VIRTUAL_STEP) -> float:
    """Return the steps until the node is needed; `inf` for a varying suffix, which no agent is known to need again."""
    if node.step is not None:
        return node.step
    return math.inf if node.varying else virtual_step


def steps_to_execution(virtual_step: float = VIRTUAL_STEP) -> EvictionPolicy:
    """Evict varying suffixes first, then what is needed last (KVFlow, section 3.1). Without labels, this is LRU."""

    def key(node: StepView) -> EvictionKey:
        is_over = node.step is None and node.varying
        return (0.0 if is_over else 1.0, -distance(node, virtual_step), node.last_access)

    return key


def policy_of(tiers: TierSettings) -> EvictionPolicy:
    """Return the eviction policy that the settings name."""
    return lru if tiers.policy == "lru" else steps_to_execution(tiers.unlabelled_step)
