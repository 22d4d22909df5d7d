"""Agents whose prompts are computed faster than translated. Most of their requests do not wait for a verdict."""

from __future__ import annotations

from typing import NamedTuple

from kedge.integrations.vllm.plugin.messages import TranslationVerdict
from kedge.structures.bounded import BoundedDict
from kedge.types import GenerateRequest, Miss, WorkflowAgent

AGENTS = 4096
SKIPS = 15
"""Requests of an agent in a row about which the workers are not asked"""


LONGER = 1.25


class _Declined(NamedTuple):
    tokens: int
    misses: tuple[Miss, ...]
    skips: int


class DeclinedAgents:
    """The last verdicts on agents where translating takes longer than computing."""

    def __init__(self) -> None:
        self._declined: BoundedDict[WorkflowAgent, _Declined] = BoundedDict(AGENTS)

    def put(self, request: GenerateRequest, verdict: TranslationVerdict) -> None:
        """Take the verdict on a request."""
        if verdict.is_declined:
            self._declined[request.workflow_agent] = _Declined(request.prompt_tokens, verdict.misses, SKIPS)
        else:
            self._declined.pop(request.workflow_agent, None)

    def take(self, request: GenerateRequest) -> tuple[Miss, ...] | None:
        """Return the misses of a request about which the workers need not be asked; None for another.

        They are asked again about a prompt that is a good deal longer, and about one after `SKIPS` others.
        """
        key = request.workflow_agent
        found = self._declined.get(key)
        if found is None or not found.skips or request.prompt_tokens > LONGER * found.tokens:
            return None
        self._declined[key] = found._replace(skips=found.skips - 1)
        return found.misses
