"""Hints for the prompts of agents that a client is expected to call next.

This is for runs whose templates the server fills. What a call has bound is remembered, and so are the answers: from
them and the forecast follows what the next agents are going to read, as far as it is known yet. A wrong guess costs
idle time and changes no answer, see `kedge.engine.base.Engine.prepare`.

Hints that are no longer valid are withdrawn: by the engine itself where the forecast does not expect the agent any more
or the run has ended, and from here where there are too many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kedge.engine.base import Engine
from kedge.runner.memory import NOTHING, RunMemory
from kedge.runner.prompts import RunPrompts
from kedge.server.workflows.registry import Registered
from kedge.server.workflows.run_memory import ClientRun
from kedge.structures.bounded import BoundedDict
from kedge.types import AgentId, GenerateRequest, RequestId, ReuseMode, TenantId
from kedge.workflow.forecast import RunKey
from kedge.workflow.graph import Step
from kedge.workflow.steps import NextRun
from kedge.workflow.template import Value

MAX_STEPS = 1.0
"""Steps-to-execution up to which an agent's prompt is given to the engine."""
MAX_RUNS, MAX_AGENTS, MAX_VALUES = 16, 4, 64
"""Runs of a tenant that get hints; hints of a run; values that are remembered of a run."""


class Lookahead:
    """The engine's hints for upcoming prompts. Belongs to the event loop."""

    def __init__(self, engine: Engine, default: ReuseMode, withdraw: Callable[[Sequence[RequestId]], None]) -> None:
        """`default`: the reuse mode where neither agent nor workflow has one. `withdraw` cancels hints, soon."""
        self._engine, self._default, self._withdraw = engine, default, withdraw
        self._runs: dict[TenantId, BoundedDict[RunKey, _KnownRun]] = {}
        """By tenant, and by the time of the last call."""

    def called(
        self, run: ClientRun, registered: Registered, step: Step, filled: GenerateRequest, asked: ReuseMode | None
    ) -> None:
        """Take in the call of a registered agent, with `filled` for its template.

        `asked` is the reuse mode that the call names; the run's other calls are expected to name it, too.
        """
        known = self._of(run.key).use(run.key, lambda: _KnownRun(registered))
        known.registered, known.asked = registered, asked
        known.read(filled, step)

    def expect(self, run: ClientRun, next_runs: Mapping[AgentId, NextRun]) -> None:
        """Give the engine the prompts, as far as they are known, of the agents that run next by the forecast."""
        known = self._of(run.key).get(run.key)
        if known is None:
            return
        requests = [known.request(run, agent, self._default) for agent in known.near(run, next_runs)]
        for request in requests:
            self._engine.prepare(request)
        hints = {request.agent: request.request_id for request in requests}
        self._withdraw([hint for agent, hint in known.hints.items() if agent not in hints])
        known.hints = hints

    def end_run(self, key: RunKey) -> None:
        """Forget a run that has ended. The engine drops its hints by itself."""
        self._of(key).pop(key, None)

    def _of(self, key: RunKey) -> BoundedDict[RunKey, _KnownRun]:
        return self._runs.setdefault(key.namespace.tenant, BoundedDict(MAX_RUNS, self._evicted))

    def _evicted(self, _: RunKey, oldest: _KnownRun) -> None:
        self._withdraw([*oldest.hints.values()])


@dataclass
class _KnownRun:
    """What one run's calls have bound, and the hints that the engine has of it."""

    registered: Registered
    asked: ReuseMode | None = None
    values: RunMemory = field(default_factory=lambda: RunMemory(MAX_VALUES))
    """What was read last. A client may have bound another text than the answer, so these go before the answers."""
    hints: dict[AgentId, RequestId] = field(default_factory=dict)
    """Expected agents with the ids of their hints."""

    def read(self, filled: GenerateRequest, step: Step) -> None:
        """Remember the values that a step has read. What is left out of its prompt is empty."""
        self.hints.pop(step.agent, None)
        values = {one.name: Value(one.tokens, one.sample) for one in filled.segments if one.is_placeholder}
        for placeholder in self.registered.prompts[step.agent].placeholders:
            if sample := self.registered.workflow.sample(step, placeholder):
                self.values.put(sample, values.get(placeholder.name, NOTHING))

    def near(self, run: ClientRun, next_runs: Mapping[AgentId, NextRun]) -> list[AgentId]:
        """Return the agents that run next, soonest first, without those whose expected call has come already."""
        known = [agent for agent in self.registered.workflow.ids if agent in next_runs and agent not in run.acting]
        soon = [agent for agent in known if next_runs[agent].steps <= MAX_STEPS]
        return sorted(soon, key=lambda agent: next_runs[agent].steps)[:MAX_AGENTS]

    def request(self, run: ClientRun, agent: AgentId, default: ReuseMode) -> GenerateRequest:
        """Return the agent's next call."""
        registered = self.registered
        prompts = RunPrompts(run.key, registered.workflow, registered.prompts, (self.values, run.answers))
        reuse = self.asked or registered.mode(registered.agent(agent), default)
        return prompts.request(Step(agent, run.turns[agent]), reuse)
