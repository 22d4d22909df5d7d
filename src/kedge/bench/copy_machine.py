"""The paper's copy machine (KVCOMM, tables 2 and 3): agents who read all messages before theirs, in random tokens.

Every agent reads a prefix of its own, the question and the answers of all agents before it. Tokens have no meaning, so
this is for measuring time; it builds requests itself, because there is no text to write a workflow in.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kedge.types import AgentId, GenerateRequest, ReuseMode, RunId, SampleId, Segment, Tokens, ValueKind, WorkflowId

LEAD, TAIL = 24, 16
"""Tokens of the prefix segment before an agent's answer, and of the last one."""
TRAIL = 2
"""Tokens that begin all prefix segments but the first alike, as in templates that end a value with a line break."""


@dataclass
class CopyMachine:
    """The agents' prompts: fixed random prefixes of `prefix` tokens, drawn from `vocab` token ids."""

    agents: int
    prefix: int
    vocab: int
    seed: int = 0
    _prefixes: list[list[Tokens]] = field(init=False, repr=False)
    _names: list[Tokens] = field(init=False, repr=False)
    _lead_in: Tokens = field(init=False, repr=False)
    _trail: Tokens = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._trail = self.tokens(TRAIL)
        self._prefixes = [self._prefix_segments(agent) for agent in range(self.agents)]
        self._names = [self.tokens(4) for _ in range(self.agents)]
        self._lead_in = self.tokens(4)

    def tokens(self, size: int) -> Tokens:
        """Return the next `size` random token ids."""
        return tuple(self._rng.randrange(2, self.vocab) for _ in range(size))

    def _prefix_segments(self, agent: int) -> list[Tokens]:
        later = [self._trail + self.tokens(size - TRAIL) for size in (*[LEAD] * agent, TAIL)]
        return [self.tokens(self.prefix), *later]

    def request(
        self,
        run: str,
        agent: int,
        question: Tokens,
        answers: list[Tokens],
        reuse: ReuseMode = ReuseMode.TRANSLATE,
        *,
        produces: bool = True,
    ) -> GenerateRequest:
        """Return agent `agent`'s request, which reads `question` and `answers` of the agents before it."""
        fills = [("user_question", SampleId(ValueKind.INPUT, "user_question"), question)]
        fills += [(f"agent_{i}_current", SampleId(ValueKind.AGENT, str(i)), answer) for i, answer in enumerate(answers)]
        segments = []
        for i, prefix in enumerate(self._prefixes[agent]):
            segments.append(Segment(prefix, f"p{i}"))
            if i < len(fills):
                name, sample, tokens = fills[i]
                context = self._prefixes[0][0] if i == 0 else self._lead_in
                segments.append(Segment(tokens, name, sample, context, self._names[i], self._trail, in_context=i == 0))
        return GenerateRequest(
            tuple(segments),
            reuse=reuse,
            run=RunId(run),
            workflow=WorkflowId("copy-machine"),
            agent=AgentId(str(agent)),
            produces=SampleId(ValueKind.AGENT, str(agent)) if produces else None,
            trail=self._trail,
        )
