"""The faults, each injected into one agent's translation through extension points or stored state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from kedge.bench.guard import damage
from kedge.bench.guard.lane import GuardLane
from kedge.bench.guard.wrong_rotation import WrongRotation
from kedge.engine.local.components import EngineComponents
from kedge.reuse.contracts import PlaceholderSite
from kedge.settings import AnchorSettings
from kedge.types import AgentId
from kedge.workflow.graph import Workflow
from kedge.workloads.miniature import TASKS, Task

REWORDED = "Follow the rules of the house. Be brief, be sure, and never repeat what the others have written."
"""An earlier version of a role"""
DEVICE, HOST = 1 << 17, 1 << 28
"""Bytes for offsets on the device, for each question in a pool, and behind it: one agent's offsets fit, those of
a whole bundled team do not"""


class GuardFault:
    """A fault of the last agent's translation; one object per engine."""

    def anchors(self, learned: int) -> Mapping[str, Any]:  # noqa: ARG002
        """Return settings of the anchors that it needs, where pools have seen so many questions."""
        return {}

    def components(self) -> EngineComponents:
        """Return what the engine is built with."""
        return EngineComponents()

    def before(self, lane: GuardLane, questions: list[str]) -> None:
        """Do what must happen before the pools fill."""

    def task(self, task: Task) -> Task:
        """Return the task whose questions are asked once the fault is there."""
        return task

    def inject(self, lane: GuardLane) -> AgentId:
        """Inject the fault. Returns the agent that it concerns."""
        raise NotImplementedError


def last_agent(flow: Workflow) -> AgentId:
    """Return the agent that decides."""
    return AgentId(flow.agents[-1].id)


class WrongRopeBase(GuardFault):
    """Translated keys are rotated by a wrong RoPE base."""

    def __init__(self) -> None:
        self._rotation = WrongRotation()

    def components(self) -> EngineComponents:
        return EngineComponents(assembler=self._rotation)

    def inject(self, lane: GuardLane) -> AgentId:
        self._rotation.agent = last_agent(lane.flow)
        return self._rotation.agent


class StaleAnchors(GuardFault):
    """Offsets that were measured under another wording of the role are used for this one."""

    def __init__(self) -> None:
        self._stale: list[PlaceholderSite] = []

    def before(self, lane: GuardLane, questions: list[str]) -> None:
        *others, last = lane.flow.agents
        lane.warm(questions, replace(lane.flow, agents=(*others, replace(last, system=REWORDED))))
        sites = lane.engine.query(partial(damage.agent_sites, agent=last_agent(lane.flow)))
        self._stale = [site for _, site in sites]

    def inject(self, lane: GuardLane) -> AgentId:
        agent = last_agent(lane.flow)
        lane.engine.query(partial(damage.swap_wordings, agent=agent, stale=self._stale))
        return agent


class SwappedHeads(GuardFault):
    """The heads of the offsets are in another order."""

    def inject(self, lane: GuardLane) -> AgentId:
        agent = last_agent(lane.flow)
        lane.engine.query(partial(damage.swap_heads, agent=agent, spec=lane.engine.kv_spec))
        return agent


class WrongScales(GuardFault):
    """The scales of 8-bit offsets are too large."""

    def anchors(self, learned: int) -> Mapping[str, Any]:  # noqa: ARG002
        return {"offset_bits": 8}

    def inject(self, lane: GuardLane) -> AgentId:
        agent = last_agent(lane.flow)
        lane.engine.query(partial(damage.enlarge_scales, agent=agent))
        return agent


class DriftedTask(GuardFault):
    """The questions are of another task than those that were learned from."""

    def task(self, task: Task) -> Task:
        return next(other for name, other in TASKS.items() if name != task.name)

    def inject(self, lane: GuardLane) -> AgentId:
        return last_agent(lane.flow)


class PoisonedAnchors(GuardFault):
    """The offsets of the anchors that were used most are random, with a standard deviation of `loudness` times the
    largest right one.
    """

    def __init__(self, count: int, loudness: float) -> None:
        self._count, self._loudness = count, loudness

    def inject(self, lane: GuardLane) -> AgentId:
        agent = last_agent(lane.flow)
        lane.engine.query(partial(damage.poison_anchors, agent=agent, count=self._count, loudness=self._loudness))
        return agent


class CorruptHost(GuardFault):
    """Bytes of offsets in host memory are flipped."""

    def anchors(self, learned: int) -> Mapping[str, Any]:
        held = min(learned, AnchorSettings().capacity)
        return {"max_bytes": held * DEVICE, "host_bytes": HOST}

    def inject(self, lane: GuardLane) -> AgentId:
        return lane.engine.query(damage.corrupt_host)


FAULTS: Mapping[str, Callable[[], GuardFault]] = {
    "rope_base": WrongRopeBase,
    "stale_anchors": StaleAnchors,
    "swapped_heads": SwappedHeads,
    "wrong_scales": WrongScales,
    "drifted_task": DriftedTask,
    "poisoned_anchor": partial(PoisonedAnchors, 1, 3.0),
    "poisoned_weakly": partial(PoisonedAnchors, 1, 0.3),
    "poisoned_faintly": partial(PoisonedAnchors, 1, 0.03),
    "poisoned_anchors": partial(PoisonedAnchors, 12, 3.0),
    "corrupt_host": CorruptHost,
}
"""Name -> a new one for each engine"""
