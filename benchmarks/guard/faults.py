"""The faults, each injected into one agent's translation through extension points or stored state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from benchmarks.guard import damage
from benchmarks.guard.damage import (
    MakeWrite,
    WrongWrites,
    at_another_base,
    from_corrupt_base,
    with_swapped_heads,
)
from benchmarks.guard.lane import DEFAULT_MOVE, LEARNED_MOVE, GuardLane, Move
from kedge.engine.local.components import EngineComponents
from kedge.reuse.contracts import PlaceholderSite
from kedge.settings import AnchorSettings
from kedge.types import AgentId
from kedge.workflow.graph import Workflow
from kedge.workloads.miniature import TASKS, Question, Task

EARLIER = (
    "You give the final answer. An example: Lena leaves Rome. Lena sells pens. Lena owns 4 keys. Which city does Lena "
    "leave? Options: Oslo, Rome, Lima, Bern. The answer is Rome."
)
"""An earlier version of a role: of those that were tried, one under which offsets differ most from those of a role that
the bundled model knows"""
DEVICE, HOST = 320 << 10, 1 << 28
"""Bytes for offsets on the device, for each question in a pool, and behind it: one agent's offsets fit, those of
a whole bundled team do not"""
KNOWN_KIND, LATER_KIND = "city", "all"
"""Kinds of questions of a task that has several: those that are learned from, and those that come later. The prompts
look the same, but the answers to the later ones depend on numbers in all sentences, not on one city"""


class GuardFault:
    """A fault of the last agent's translation; one object per engine."""

    move: Move = LEARNED_MOVE
    """How the engine moves values"""

    @classmethod
    def fits(cls, task: Task) -> bool:  # noqa: ARG003
        """Return whether a task can have it."""
        return True

    def anchors(self, learned: int) -> Mapping[str, Any]:  # noqa: ARG002
        """Return settings of the anchors that it needs, where pools have seen so many questions."""
        return {}

    def components(self) -> EngineComponents:
        """Return what the engine is built with."""
        return EngineComponents()

    def before(self, lane: GuardLane, questions: list[str]) -> None:
        """Do what must happen before the pools fill."""

    def learned(self, task: Task) -> Task:
        """Return the task whose questions are learned from."""
        return task

    def later(self, task: Task) -> Task:
        """Return the task whose questions are asked once the fault is there."""
        return task

    def inject(self, lane: GuardLane) -> AgentId:
        """Inject the fault. Returns the agent that it concerns."""
        raise NotImplementedError


def last_agent(flow: Workflow) -> AgentId:
    """Return the agent that decides."""
    return AgentId(flow.agents[-1].id)


class WrongWritesOf(GuardFault):
    """What translation writes is wrong, in one way or another."""

    def __init__(self, make: MakeWrite, move: Move = LEARNED_MOVE) -> None:
        self._writes, self.move = WrongWrites(make), move

    def components(self) -> EngineComponents:
        return EngineComponents(assembler=self._writes)

    def inject(self, lane: GuardLane) -> AgentId:
        self._writes.agent = last_agent(lane.flow)
        return self._writes.agent


class StaleAnchors(GuardFault):
    """Offsets that were measured under another wording of the role are used for this one."""

    def __init__(self) -> None:
        self._stale: list[PlaceholderSite] = []

    def before(self, lane: GuardLane, questions: list[str]) -> None:
        *others, last = lane.flow.agents
        lane.warm(questions, replace(lane.flow, agents=(*others, replace(last, system=EARLIER))))
        sites = lane.engine.query(partial(damage.agent_sites, agent=last_agent(lane.flow)))
        self._stale = [site for _, site in sites]

    def inject(self, lane: GuardLane) -> AgentId:
        agent = last_agent(lane.flow)
        lane.engine.query(partial(damage.swap_wordings, agent=agent, stale=self._stale))
        return agent


class SwappedOffsets(GuardFault):
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

    def later(self, task: Task) -> Task:
        return next(other for name, other in TASKS.items() if name != task.name)

    def inject(self, lane: GuardLane) -> AgentId:
        return last_agent(lane.flow)


class DriftedQuestions(GuardFault):
    """The questions look like those that were learned from, but the answers depend on other tokens of them."""

    @classmethod
    def fits(cls, task: Task) -> bool:
        return "kind" in next(task.questions("test", 0)).facts

    def learned(self, task: Task) -> Task:
        return _of_kind(task, KNOWN_KIND)

    def later(self, task: Task) -> Task:
        return _of_kind(task, LATER_KIND)

    def inject(self, lane: GuardLane) -> AgentId:
        return last_agent(lane.flow)


def _of_kind(task: Task, kind: str) -> Task:
    def generate(rng: Random) -> Question:
        return next(question for question in iter(partial(task.generate, rng), None) if question.facts["kind"] == kind)

    return replace(task, generate=generate)


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
    """Bytes of offsets in host memory are flipped. The others' offsets have pushed the last agent's there."""

    def anchors(self, learned: int) -> Mapping[str, Any]:
        held = min(learned, AnchorSettings().capacity)
        return {"max_bytes": held * DEVICE, "host_bytes": HOST}

    def before(self, lane: GuardLane, questions: list[str]) -> None:  # noqa: ARG002
        self._question = questions[0]

    def inject(self, lane: GuardLane) -> AgentId:
        agent = last_agent(lane.flow)
        lane.ask(self._question, replace(lane.flow, agents=lane.flow.agents[:-1]))
        lane.engine.query(partial(damage.corrupt_host, agent=agent))
        return agent


FAULTS: Mapping[str, Callable[[], GuardFault]] = {
    "rope_base": partial(WrongWritesOf, at_another_base),
    "stale_anchors": StaleAnchors,
    "swapped_heads": partial(WrongWritesOf, with_swapped_heads),
    "swapped_offsets": SwappedOffsets,
    "wrong_scales": WrongScales,
    "drifted_task": DriftedTask,
    "drifted_questions": DriftedQuestions,
    "poisoned_anchor": partial(PoisonedAnchors, 1, 3.0),
    "poisoned_anchors": partial(PoisonedAnchors, 12, 3.0),
    "corrupt_host": CorruptHost,
    "default_rope_base": partial(WrongWritesOf, at_another_base, DEFAULT_MOVE),
    "default_swapped_heads": partial(WrongWritesOf, with_swapped_heads, DEFAULT_MOVE),
    "default_corrupt_base": partial(WrongWritesOf, from_corrupt_base, DEFAULT_MOVE),
}
"""Name -> a new one for each engine"""
