"""Agents that were found, by what their prompts begin with and the blocks that their fixed prompts end with."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Self

from kedge.discovery.bounds import MAX_AGENTS, MAX_OF_ONE
from kedge.discovery.templates import Filled, PromptTemplate, agent_of
from kedge.structures import token_bytes
from kedge.structures.bounded import BoundedDict
from kedge.types import AgentId, WorkflowId

BLOCK_TOKENS = 16
"""Tokens of a block, and the least that an agent, or a part of an answer, is known by"""
LEAST_SHARE = 1 / 16
"""Share of an agent's fixed prompt by which prompts that begin alike for longer may be another agent's"""


@dataclass(eq=False, slots=True)
class FoundAgent:
    """An agent, as far as it is known."""

    id: AgentId
    team: WorkflowId
    """Agents that read each other's texts"""
    block: Hashable
    """The block that its fixed prompt ends with"""
    head: int
    """Tokens of the beginning that it is known by"""
    templates: list[PromptTemplate] = field(default_factory=list)
    """In the order in which they are tried, the newest first"""
    names: list[AgentId] = field(default_factory=list)
    """Its id, then those of agents that turned out to be this one"""
    calls: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    """Tokens of values that others had or read before"""
    passed: int = 0
    """Prompts since its last one that began like its own and were of agents with longer fixed prompts"""
    same_as: Self | None = None
    """The agent that it turned out to be"""

    @property
    def current(self) -> Self:
        """The agent that it is by now."""
        return self.same_as.current if self.same_as else self

    def to_dict(self) -> dict[str, object]:
        """Return its figures as plain data."""
        return {
            "id": self.id,
            "team": self.team,
            "calls": self.calls,
            "fixed_tokens": token_bytes.size(self.templates[0].head),
            "prompt_tokens": self.prompt_tokens,
            "shared_tokens": self.shared_tokens,
        }

    def absorb(self, other: Self) -> None:
        """Take over the calls and templates of an agent that is this one."""
        other.same_as = self
        self.names = [*self.names, *other.names][:MAX_OF_ONE]
        self.templates = [*self.templates, *other.templates][:MAX_OF_ONE]
        self.calls += other.calls
        self.prompt_tokens += other.prompt_tokens
        self.shared_tokens += other.shared_tokens


class FoundAgents:
    """The agents of one namespace. One thread owns it."""

    def __init__(self) -> None:
        self._by_block: BoundedDict[Hashable, FoundAgent] = BoundedDict(MAX_AGENTS, lambda _, one: self._drop(one))
        self.by_id: dict[AgentId, FoundAgent] = {}

    def fill(
        self, prompt: bytes, chain: Sequence[Hashable], ends: Sequence[Sequence[int]]
    ) -> tuple[FoundAgent, list[Filled]] | None:
        """Return the agent with the longest fixed prompt that a packed prompt follows, with what fills its slots.

        `ends` are the blocks of its `chain` that are ends of fixed prompts, `grouped`.
        """
        for number, groups in enumerate(ends):
            agent = self._of(chain, groups)
            for template in agent.templates if agent else ():
                if agent and (filled := template.fill(prompt)):
                    self._by_block.move_to_end(agent.block)
                    agent.passed = 0
                    for block in [chain[group[0]] for group in ends[number + 1 :]]:
                        if other := self._by_block.get(block):  # its fixed prompt is shorter
                            other.passed += 1
                            if other.passed >= MAX_OF_ONE:
                                del self._by_block[block]
                                self._drop(other)
                    return agent, filled
        return None

    def learned(self, template: PromptTemplate, block: Hashable, head: int) -> FoundAgent:
        """Return the agent of a new template whose fixed prompt ends with `block`, after `head` tokens."""
        agent = self._by_block.get(block)
        if agent is None:
            name = AgentId(blake2b(token_bytes.cut(template.head, 0, head), digest_size=6).hexdigest())
            agent = self.by_id.get(name)
            if agent is None:
                sources = {agent_of(slot.label) for slot in template.slots}
                teams = [one.team for one in self.by_id.values() if sources.intersection(one.names)]
                team = min(teams, default=WorkflowId(f"team-{name}"))
                agent = FoundAgent(name, team, block, head, names=[name])
            self._place(agent, block, token_bytes.cut(template.head, 0, head))
        return agent

    def _of(self, chain: Sequence[Hashable], group: Sequence[int]) -> FoundAgent | None:
        """Return the agent of ends that lie close together: it is known by the first of them."""
        block = chain[group[0]]
        known = (self._by_block[chain[at]] for at in group if chain[at] in self._by_block)
        agent = next(known, None)
        if agent is not None and agent.block != block:
            self._place(agent, block, token_bytes.cut(agent.templates[0].head, 0, (group[0] + 1) * BLOCK_TOKENS))
        return agent

    def _place(self, agent: FoundAgent, block: Hashable, head: bytes) -> None:
        """Let an agent be known by a beginning, and take over those that begin like it for little longer.

        They were found before in prompts whose values begin alike.
        """
        if self._by_block.get(agent.block) is agent:
            del self._by_block[agent.block]
        agent.block, agent.head = block, token_bytes.size(head)
        size = token_bytes.size(head)
        near = [one for one in self._by_block.values() if size <= one.head < (1 + LEAST_SHARE) * size]
        for other in [one for one in near if one is not agent and one.templates[0].head.startswith(head)]:
            del self._by_block[other.block]
            self._drop(other)
            agent.absorb(other)
        self._by_block[block] = self.by_id[agent.id] = agent

    def _drop(self, agent: FoundAgent) -> None:
        if self.by_id.get(agent.id) is agent:
            del self.by_id[agent.id]


def grouped(heads: Sequence[int]) -> list[list[int]]:
    """Return ends of fixed prompts in groups that are each one agent's, the last group first, its first end first.

    `heads` are numbers of blocks, the last one first. Ends that follow another by less than `LEAST_SHARE` of the prompt
    up to there are how its values begin.
    """
    groups = list[list[int]]()
    for at in reversed(heads):
        if not groups or at - groups[-1][0] >= LEAST_SHARE * (groups[-1][0] + 1):
            groups.append([])
        groups[-1].append(at)
    return groups[::-1]
