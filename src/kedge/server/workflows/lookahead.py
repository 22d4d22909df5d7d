"""Prompts of agents that a client is expected to call next, told to the engine before they are asked for.

This is for runs whose templates the server fills. What a call has bound is remembered, and so are the answers: from
them and the forecast follows what the next agents are going to read, as far as anybody knows it yet. A guess that is
wrong costs idle time and changes no answer, see `kedge.engine.base.Preparing`.

Who is told of no longer is withdrawn: by the engine itself where the forecast does not expect the agent any more or the
run has ended, and from here where there are too many.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kedge.engine.base import Engine, Preparing
from kedge.server.workflows.registry import Registered
from kedge.server.workflows.run_memory import ClientRun, sample_of
from kedge.types import (
    AgentId,
    ClientId,
    GenerateRequest,
    RequestId,
    ReuseMode,
    SampleId,
    TenantId,
    WorkflowId,
    tenant_of,
)
from kedge.workflow.forecast import RunKey
from kedge.workflow.graph import Step
from kedge.workflow.steps import NextRun
from kedge.workflow.template import Kind, Placeholder, Value

NEAR = 1.0
"""Steps-to-execution up to which an agent's prompt is told."""
MOST_RUNS, MOST_AGENTS, MOST_VALUES = 16, 4, 64
"""Runs of a tenant whose agents are told of; agents of a run; values that are remembered of a run."""

_NOTHING = Value((), SampleId(""))
"""What is known to be empty."""


class Lookahead:
    """What the engine has been told to expect. Only the event loop's thread touches it."""

    def __init__(self, engine: Engine, default: ReuseMode, withdraw: Callable[[Sequence[RequestId]], None]) -> None:
        """`default`: the mode of agents where nothing else says. `withdraw` cancels hints in the engine, soon."""
        self._engine, self._default, self._withdraw = engine, default, withdraw
        self._runs: dict[TenantId, OrderedDict[RunKey, _Known]] = {}
        """By tenant, and by the time of the last call."""

    def called(
        self, run: ClientRun, registered: Registered, step: Step, filled: GenerateRequest, asked: ReuseMode | None
    ) -> None:
        """A registered agent's call has begun, with `filled` for its template. `asked`: the mode that it named, which
        the run's other calls are expected to name, too."""
        mine = self._of(run.key)
        known = mine.setdefault(run.key, _Known(registered))
        mine.move_to_end(run.key)
        known.registered, known.asked = registered, asked
        known.read(filled, step)
        while len(mine) > MOST_RUNS:
            _, oldest = mine.popitem(last=False)
            self._withdraw([*oldest.told.values()])

    def expect(self, run: ClientRun, next_runs: Mapping[AgentId, NextRun]) -> None:
        """Tells the prompts of those who run next by the forecast, as far as they are known."""
        known = self._of(run.key).get(run.key)
        if known is None or not isinstance(self._engine, Preparing):
            return
        requests = [known.request(run, agent, self._default) for agent in known.near(run, next_runs)]
        for request in requests:
            self._engine.prepare(request)
        told = {request.agent: request.request_id for request in requests}
        self._withdraw([hint for agent, hint in known.told.items() if agent not in told])
        known.told = told

    def over(self, key: RunKey) -> None:
        """The run has ended; the engine forgets what it expected when it is told so."""
        self._of(key).pop(key, None)

    def _of(self, key: RunKey) -> OrderedDict[RunKey, _Known]:
        return self._runs.setdefault(tenant_of(key.tenant), OrderedDict())


@dataclass
class _Known:
    """What is known of one run's prompts."""

    registered: Registered
    asked: ReuseMode | None = None
    values: OrderedDict[SampleId, Value] = field(default_factory=OrderedDict)
    """What was read last. A client may have bound another text than the answer, so these go before the answers."""
    told: dict[AgentId, RequestId] = field(default_factory=dict)
    """Agents that the engine expects, with the ids of the hints."""

    def read(self, filled: GenerateRequest, step: Step) -> None:
        """A step has read these values. What is left out of its prompt is empty."""
        self.told.pop(step.agent, None)
        values = {one.name: Value(one.tokens, one.sample) for one in filled.segments if one.sample is not None}
        for placeholder in self.registered.prompts[step.agent].placeholders:
            if origin := self._origin(step, placeholder):
                self.values[origin] = values.get(placeholder.name, _NOTHING)
                self.values.move_to_end(origin)
        while len(self.values) > MOST_VALUES:
            self.values.popitem(last=False)

    def near(self, run: ClientRun, next_runs: Mapping[AgentId, NextRun]) -> list[AgentId]:
        """The agents that run next, soonest first; without those that the forecast meant when it named them."""
        known = [agent for agent in self.registered.workflow.ids if agent in next_runs and agent not in run.acting]
        soon = [agent for agent in known if next_runs[agent].steps <= NEAR]
        return sorted(soon, key=lambda agent: next_runs[agent].steps)[:MOST_AGENTS]

    def request(self, run: ClientRun, agent: AgentId, default: ReuseMode) -> GenerateRequest:
        """The agent's next call. What nobody has said yet are segments without tokens."""
        step, prompt, one = Step(agent, run.turns[agent]), self.registered.prompts[agent], self.registered.agent(agent)
        values = {placeholder: self._value(run, step, placeholder) for placeholder in prompt.placeholders}
        return GenerateRequest(
            segments=prompt.fill(values, {value.sample for value in values.values() if _is_awaited(value)}),
            sampling=one.sampling,
            reuse=self.asked or self.registered.mode(one, default),
            tenant=run.key.tenant,
            client=ClientId(run.key.client_id),
            workflow=WorkflowId(self.registered.workflow.name),
            run=run.key.run_id,
            agent=agent,
            fixed=len(prompt.prefixes[0]),
        )

    def _value(self, run: ClientRun, step: Step, placeholder: Placeholder) -> Value:
        """What `placeholder` will be filled with; without tokens where that is not known yet."""
        origin = self._origin(step, placeholder)
        if origin is None:
            return _NOTHING
        return self.values.get(origin) or run.answer(origin) or Value((), origin)

    def _origin(self, step: Step, placeholder: Placeholder) -> SampleId | None:
        """The sample that `placeholder` stands for; None: before the first turn there was nothing."""
        if placeholder.kind is Kind.INPUT:
            return SampleId(f"input_{placeholder.of}@0")
        source = self.registered.workflow.source(step, placeholder)
        return None if source is None else sample_of(source, placeholder.kind)


def _is_awaited(value: Value) -> bool:
    return value != _NOTHING and not value.tokens
