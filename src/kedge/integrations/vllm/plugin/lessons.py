"""Lessons: while as many prompts of an agent as a translation needs are computed and learned from, its other requests
wait for that.

A crowd of runs that begins in step has as many requests of each agent at once. Where all of them are admitted before
any has been learned from, all are computed.
"""

from __future__ import annotations

from collections.abc import Callable

from kedge.integrations.vllm.plugin.candidates import TranslationCandidate
from kedge.structures.bounded import BoundedDict
from kedge.types import Namespace, RequestId, Tokens, WorkflowAgent

MAX_AGENTS = 4096
MAX_LESSON_WAITS = 64
"""Steps for which a request waits for lessons; then it is computed, and its agent's other requests wait no more"""


class Lessons:
    """The prompts of one scheduler by which agents learn to be translated."""

    def __init__(self, hurry: Callable[[Namespace, Tokens], None]) -> None:
        """`hurry` is called with base prefills that a lesson needs for which requests wait."""
        self._hurry = hurry
        self._under_way: BoundedDict[WorkflowAgent, dict[RequestId, tuple[Tokens, ...]]] = BoundedDict(
            MAX_AGENTS, lambda agent, _: self._end(agent)
        )
        """Agent -> admitted requests that have not been learned from, with the base prefills that this takes"""
        self._failed: BoundedDict[WorkflowAgent, None] = BoundedDict(MAX_AGENTS)
        """Agents whose lessons took too long"""
        self._awaited: dict[WorkflowAgent, None] = {}

    @property
    def awaited(self) -> tuple[WorkflowAgent, ...]:
        """The agents of whose lessons requests wait."""
        return tuple(self._awaited)

    def admit(self, candidate: TranslationCandidate) -> None:
        """Take an admitted request, which is computed and learned from if its agent needs that."""
        agent = candidate.hinted.request.workflow_agent
        if candidate.lessons and agent not in self._failed:
            self._under_way.use(agent, dict)[candidate.request_id] = candidate.needs

    def must_wait(self, candidate: TranslationCandidate) -> bool:
        """Return whether a request waits, as all the lessons that its agent needs are under way."""
        agent = candidate.hinted.request.workflow_agent
        lessons = self._under_way.get(agent, {})
        if not 0 < candidate.lessons <= len(lessons) or candidate.request_id in lessons:
            return False
        candidate.lesson_waits += 1
        if candidate.lesson_waits > MAX_LESSON_WAITS:
            self._failed[agent] = None
            self._end(agent)
            return False
        self._await(agent)
        return True

    def _await(self, agent: WorkflowAgent) -> None:
        if agent not in self._awaited:
            self._awaited[agent] = None
            for needs in self._under_way[agent].values():
                for tokens in needs:
                    self._hurry(agent.namespace, tokens)

    def taught(self, agent: WorkflowAgent) -> None:
        """Take that one prompt of an agent, the first that was admitted, has been learned from."""
        if lessons := self._under_way.get(agent):
            lessons.pop(next(iter(lessons)))
        if not lessons:
            self._end(agent)

    def _end(self, agent: WorkflowAgent) -> None:
        self._under_way.pop(agent, None)
        self._awaited.pop(agent, None)

    def drop(self, candidate: TranslationCandidate) -> None:
        """Take a request that has ended: one that was not computed to the end of its prompt teaches nothing."""
        agent = candidate.hinted.request.workflow_agent
        lessons = self._under_way.get(agent, {})
        if candidate.request_id in lessons and not candidate.captured:
            del lessons[candidate.request_id]
            if not lessons:
                self._end(agent)
