"""The requests of a run's steps: compiled templates, filled with what is remembered of the run.

A step's request can be made before all that it reads is known. It is a hint for `Engine.prepare` then.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Self

from kedge.engine.base import Tokenizer
from kedge.guard import GuardOrders
from kedge.types import AgentId, AgentKey, ClientId, GenerateRequest, ReuseMode, RunKey, SampleId, Tokens, WorkflowId
from kedge.workflow.graph import Step, Workflow
from kedge.workflow.template import CompiledAgent, Value, compile_agents

NOTHING = Value((), None)
"""The value of a placeholder that is known to be empty."""


class Remembered(NamedTuple):
    """What fills the placeholders that stand for one sample, and the text that it was made of where that is known."""

    value: Value
    text: str = ""

    @classmethod
    def of(cls, value: Value, text: str = "") -> Self:
        """Return what is remembered of a value; one without tokens is known to be empty."""
        return cls(value if value.tokens else NOTHING, text)

    @classmethod
    def read(cls, sample: SampleId, text: str, tokenizer: Tokenizer, answer: Tokens = ()) -> Self:
        """Return what is remembered of a text: an answer's tokens, unless they go on behind it with a stop string."""
        tokens = tokenizer.plain(answer)
        if (decoded := tokenizer.decode(tokens)) != text and (not decoded or decoded.startswith(text)):
            tokens = tokenizer.encode(text, special=False, inside=True)
        return cls.of(Value(tokens, sample), text)


@lru_cache(maxsize=16)
def compiled(workflow: Workflow, tokenizer: Tokenizer) -> Mapping[AgentId, CompiledAgent]:
    """Return the compiled prompts of a workflow's agents, once per workflow and tokenizer."""
    return compile_agents(workflow.agents, tokenizer)


def fixed_prompts(run: RunKey, prompts: Mapping[AgentId, CompiledAgent]) -> dict[AgentKey, Tokens]:
    """Return the tokens that every prompt of an agent begins with, for those agents that have some."""
    return {AgentKey(*run, agent): prompt.prefixes[0] for agent, prompt in prompts.items() if prompt.prefixes[0]}


@dataclass(frozen=True)
class RunPrompts:
    """Makes the requests of one run's steps."""

    run: RunKey
    workflow: Workflow
    prompts: Mapping[AgentId, CompiledAgent]
    memories: Sequence[Mapping[SampleId, Remembered]]
    """Where values are looked up; the first that knows a sample gives its value."""

    def request(self, step: Step, reuse: ReuseMode, produces: SampleId | None = None) -> GenerateRequest:
        """Return a step's request. Values that are not known yet are segments without tokens."""
        prompt, agent = self.prompts[step.agent], self.workflow.agent(step.agent)
        values = {}
        for placeholder in prompt.placeholders:
            sample = self.workflow.sample(step, placeholder)
            if sample is None:
                values[placeholder] = NOTHING
            else:
                found = (memory[sample] for memory in self.memories if sample in memory)
                values[placeholder] = next((known.value for known in found), Value((), sample))
        awaited = {value.sample for value in values.values() if value.sample and not value.tokens}
        return GenerateRequest(
            segments=prompt.fill(values, awaited),
            sampling=agent.sampling,
            reuse=reuse,
            guard=GuardOrders(agent.guard, fidelity=agent.fidelity, pick=agent.pick),
            tenant=self.run.namespace.tenant,
            partition=self.run.namespace.partition,
            client=ClientId(self.run.client_id),
            workflow=WorkflowId(self.workflow.name),
            run=self.run.run_id,
            agent=step.agent,
            fixed=len(prompt.prefixes[0]),
            produces=produces,
        )
