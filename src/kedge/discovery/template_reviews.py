"""Templates that are learned once more, from later prompts, in which more of the text is known.

An agent's first prompts are often read before it is known whose answers they quote: those agents are not found yet, or
their first answers are too short to be looked for. What all answers begin with is then taken for fixed text.
"""

from __future__ import annotations

from collections.abc import Iterable

from kedge.discovery.found_agents import FoundAgent
from kedge.discovery.known_texts import KnownTexts
from kedge.discovery.templates import EXAMPLES, Example, Occurrence, PromptTemplate, Slot, is_answer, learn
from kedge.structures.bounded import BoundedDict
from kedge.types import AgentId

FIRST, LOOKED = 4, 4
"""Calls of an agent before its first review, and prompts that one looks at; there is one whenever calls have doubled"""
MAX_AGENTS = 64
"""Agents of which prompts are kept"""
MAX_PROMPT_BYTES = 1 << 17
"""Bytes of a prompt that is looked at"""


class TemplateReviews:
    """The reviews of one namespace. One thread owns it."""

    def __init__(self, texts: KnownTexts) -> None:
        self._texts = texts
        self._examples: BoundedDict[AgentId, list[Example]] = BoundedDict(MAX_AGENTS)
        """Prompts with answers that their agent's template has no slot for"""

    def take(self, agent: FoundAgent, prompt: bytes) -> PromptTemplate | None:
        """Look at a packed prompt, where it is time to. Returns a template with more answers than the agent's has."""
        if not _is_due(agent.calls) or len(prompt) > MAX_PROMPT_BYTES:
            return None
        example = Example(prompt, self._texts.find(prompt, agent.head))
        if not _answers(example.known) - _answers(agent.templates[0].slots):
            return None
        examples = self._examples.use(agent.id, list)
        examples.append(example)
        if len(examples) < EXAMPLES:
            return None
        del self._examples[agent.id]
        template = learn(examples)
        if template is None or len(_answers(template.slots)) <= len(_answers(agent.templates[0].slots)):
            return None
        return template


def _is_due(calls: int) -> bool:
    """Return whether an agent's prompt after so many calls is one of the first after they doubled."""
    return calls >= FIRST and calls - (1 << calls.bit_length() - 1) < LOOKED


def _answers(texts: Iterable[Slot | Occurrence]) -> set[str]:
    """Return the labels of those that are answers."""
    return {one.label for one in texts if is_answer(one.label)}
