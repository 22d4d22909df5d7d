"""State of one run that a client drives, and the values of its agents' placeholders.

An answer is remembered with its token ids, so that an agent that reads it later reads the same sample: the KV that
decoding left behind is then its base KV.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from kedge.engine.base import Tokenizer
from kedge.errors import RequestError
from kedge.runner.memory import NOTHING, Remembered, RunMemory
from kedge.server.workflows import bindings as given
from kedge.server.workflows.registry import Registered
from kedge.types import AgentId, Completion, ValueKind
from kedge.workflow.forecast import RunKey, RunProgress
from kedge.workflow.graph import Step
from kedge.workflow.template import CompiledAgent, Placeholder, Value

MAX_ANSWERS = 1024
"""Answers of a run that are remembered."""


@dataclass
class ClientRun:
    """Run that a client drives."""

    key: RunKey
    heard: float
    progress: RunProgress | None = None
    """None where no registered workflow has a forecast for the run, or the client sends its own."""
    turns: Counter[AgentId] = field(default_factory=Counter)
    answers: RunMemory = field(default_factory=lambda: RunMemory(MAX_ANSWERS))
    running: Counter[AgentId] = field(default_factory=Counter)
    """Calls in flight by agent."""
    called: set[AgentId] = field(default_factory=set)
    """Agents that have called since the forecast was made."""

    @property
    def acting(self) -> Set[AgentId]:
        """Agents whose expected call has come, so that the forecast does not yet cover their next one."""
        return self.running.keys() | self.called

    def call(self, agent: AgentId) -> None:
        """Count a call of `agent` as in flight."""
        self.running[agent] += 1
        self.called.add(agent)

    def end_call(self, agent: AgentId) -> None:
        """Count a call of `agent` as ended, or as one that could not begin."""
        self.running -= Counter({agent: 1})

    def begin(self, agent: AgentId) -> Step:
        """Begin the next turn of `agent`."""
        self.turns[agent] += 1
        return Step(agent, self.turns[agent] - 1)

    def give_back(self, step: Step) -> None:
        """Take back a turn that could not begin, if it is the agent's newest."""
        if self.turns[step.agent] == step.turn + 1:
            self.turns[step.agent] -= 1

    def keep(self, step: Step, completion: Completion) -> None:
        """Remember an answer that is not empty."""
        if completion.tokens:
            self.answers.put(step.sample(), Value(completion.tokens, step.sample()), completion.text)


def values_for(
    prompt: CompiledAgent,
    bindings: Mapping[str, str],
    tokenizer: Tokenizer,
    registered: Registered,
    run: ClientRun | None,
    step: Step,
) -> dict[Placeholder, Value]:
    """Return what fills an agent's placeholders: the client's bindings, and the answers of its run.

    Raises `RequestError` for a binding that the agent does not read, or a placeholder without a value.
    """
    given.require_known(bindings, prompt.placeholders)
    values: dict[Placeholder, Value] = {}
    for placeholder in prompt.placeholders:
        text = bindings.get(placeholder.name)
        known = _remembered(registered, run, step, placeholder)
        if text is None and known is None:
            raise RequestError("kedge.bindings", placeholder.name, "has no value")
        if known is not None and text in (None, known.text):
            values[placeholder] = known.value
        else:
            values[placeholder] = given.value_of(tokenizer, placeholder, text or "")
    return values


def _remembered(
    registered: Registered, run: ClientRun | None, step: Step, placeholder: Placeholder
) -> Remembered | None:
    if run is None or placeholder.kind is not ValueKind.AGENT:
        return None
    sample = registered.workflow.sample(step, placeholder)
    return Remembered(NOTHING, "") if sample is None else run.answers.find(sample)
