"""What one run that a client drives remembers, and how its agents' placeholders are filled from that.

An answer is remembered with its token ids, so that an agent that reads it later reads the same sample: the KV that
decoding left behind is then its base KV.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from kedge.engine.base import Tokenizer
from kedge.errors import RequestError
from kedge.server.workflows import bindings as given
from kedge.server.workflows.registry import Registered
from kedge.types import AgentId, Completion, SampleId
from kedge.workflow.forecast import RunKey, RunProgress
from kedge.workflow.graph import Step
from kedge.workflow.template import CompiledAgent, Kind, Placeholder, Value

MOST_ANSWERS = 1024
"""Answers that a run remembers."""


@dataclass
class ClientRun:
    """One run that a client drives."""

    key: RunKey
    heard: float
    progress: RunProgress | None = None
    """None where no registered workflow says who comes next, or the client says it itself."""
    turns: Counter[AgentId] = field(default_factory=Counter)
    answers: dict[SampleId, tuple[str, Value]] = field(default_factory=dict)
    """What was said, as text and as the sample that it is."""
    running: Counter[AgentId] = field(default_factory=Counter)
    """Agents whose calls go on, and how many."""
    called: set[AgentId] = field(default_factory=set)
    """Agents that have called since the forecast was made."""

    @property
    def acting(self) -> Set[AgentId]:
        """Agents of which the forecast no longer says when they run next: it meant the call that has come."""
        return self.running.keys() | self.called

    def call(self, agent: AgentId) -> None:
        """A call of `agent` goes on from now on."""
        self.running[agent] += 1
        self.called.add(agent)

    def end_call(self, agent: AgentId) -> None:
        """A call of `agent` has ended, or could not begin."""
        self.running -= Counter({agent: 1})

    def begin(self, agent: AgentId) -> Step:
        """The next turn of `agent`."""
        self.turns[agent] += 1
        return Step(agent, self.turns[agent] - 1)

    def give_back(self, step: Step) -> None:
        """A turn that could not begin did not happen."""
        if self.turns[step.agent] == step.turn + 1:
            self.turns[step.agent] -= 1

    def keep(self, step: Step, completion: Completion) -> None:
        """Remembers an answer."""
        if completion.tokens and len(self.answers) < MOST_ANSWERS:
            sample = sample_of(step)
            self.answers[sample] = completion.text, Value(completion.tokens, sample)

    def answer(self, sample: SampleId) -> Value | None:
        """What was said, if it was and is remembered."""
        said = self.answers.get(sample)
        return None if said is None else said[1]


def sample_of(step: Step, kind: Kind = Kind.AGENT) -> SampleId:
    """The sample that an agent's answer is, or what its tool made of it."""
    return SampleId(f"{kind}_{step.agent}@{step.turn}")


def values_for(
    prompt: CompiledAgent,
    bindings: Mapping[str, str],
    tokenizer: Tokenizer,
    registered: Registered,
    run: ClientRun | None,
    step: Step,
) -> dict[Placeholder, Value]:
    """What fills an agent's placeholders: the bindings, and what its run remembers.

    Raises `RequestError` for a binding that the agent does not read, or a placeholder that nothing is known of.
    """
    given.require_known(bindings, prompt.placeholders)
    values: dict[Placeholder, Value] = {}
    for placeholder in prompt.placeholders:
        text = bindings.get(placeholder.name)
        known = _remembered(registered, run, step, placeholder)
        if text is None and known is None:
            raise RequestError("kedge.bindings", placeholder.name, "has no value")
        if known is not None and text in (None, known[0]):
            values[placeholder] = known[1]
        else:
            values[placeholder] = given.value_of(tokenizer, placeholder, text or "")
    return values


def _remembered(
    registered: Registered, run: ClientRun | None, step: Step, placeholder: Placeholder
) -> tuple[str, Value] | None:
    if run is None or placeholder.kind is not Kind.AGENT:
        return None
    source = registered.workflow.source(step, placeholder)
    return ("", Value((), SampleId(""))) if source is None else run.answers.get(sample_of(source))
