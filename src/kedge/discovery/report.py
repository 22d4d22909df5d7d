"""The report of plain traffic: what in an application's prompts defeats reuse, and all of it in one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import Any

from kedge.discovery import token_bytes
from kedge.discovery.bounds import MAX_LOOKED_AT, SHORT
from kedge.discovery.found_agents import FoundAgent
from kedge.discovery.templates import Slot
from kedge.types import AgentId

ALIKE = 0.9
"""Share of their pairs of tokens that two fixed prompts have in common if one could share most of the other"""


class FindingKind(StrEnum):
    """What was found."""

    EARLY_VALUE = "a value in the middle of fixed text"
    ROLE_FIRST = "a role before shared text"
    COMMON_TEXT = "fixed text of another agent in another order, or behind another beginning"


ADVICE = {
    FindingKind.EARLY_VALUE: "put what changes, such as a time or a name, behind all that stays",
    FindingKind.ROLE_FIRST: "where the model allows it, put the shared text first and the role behind it",
    FindingKind.COMMON_TEXT: "put what agents have in common first, tools in one order, and what tells them apart last",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One place where prompts could share more."""

    kind: FindingKind
    agent: AgentId
    tokens: int
    """Tokens of each of its calls that would come from the cache"""
    calls: int

    def to_dict(self) -> dict[str, object]:
        """Return the finding as plain data, with what to do about it."""
        return {
            "kind": self.kind.value,
            "agent": self.agent,
            "tokens_per_call": self.tokens,
            "calls": self.calls,
            "advice": ADVICE[self.kind],
        }


def find_waste(agents: Sequence[FoundAgent]) -> list[Finding]:
    """Return what was found in the prompts of some agents, what saves the most first."""
    found: list[Finding] = []
    readers = Counter(slot.label for agent in agents for slot in agent.templates[0].slots)
    for agent in agents:
        slots = agent.templates[0].slots
        # A short value of its own, and much fixed text between it and the next one.
        if len(slots) > 1 and _is_own(slots[0], agent) and token_bytes.size(slots[0].first) <= SHORT:
            found.append(Finding(FindingKind.EARLY_VALUE, agent.id, token_bytes.size(slots[0].after), agent.calls))
        # A text that another reads too, behind another beginning.
        first = next((slot for slot in slots if readers[slot.label] > 1), None)
        if first is not None and not _is_own(first, agent):
            found.append(Finding(FindingKind.ROLE_FIRST, agent.id, token_bytes.size(first.first), agent.calls))
    # A fixed prompt that is nearly that of an agent with more calls.
    heads = [agent.templates[0].head for agent in agents[:MAX_LOOKED_AT]]
    for at, (agent, head) in enumerate(zip(agents, heads, strict=False)):
        if other := next((one for one in heads[:at] if _alike(one, head)), None):
            lost = max(map(token_bytes.size, (other, head))) - token_bytes.common_head((other, head))
            found.append(Finding(FindingKind.COMMON_TEXT, agent.id, lost, agent.calls))
    worth = [one for one in found if one.tokens >= SHORT]
    return sorted(worth, key=lambda one: one.tokens * one.calls, reverse=True)


@lru_cache(MAX_LOOKED_AT)  # a report is made every few seconds, and what agents begin with stays
def _pairs(text: bytes) -> frozenset[tuple[int, int]]:
    """Return the pairs of tokens that follow one another in a text."""
    return frozenset(pairwise(token_bytes.unpack(text)))


def _alike(one: bytes, other: bytes) -> bool:
    """Return whether two texts have nearly all of their pairs of tokens in common, in whatever order."""
    fewer, more = sorted((_pairs(one), _pairs(other)), key=len)
    least = ALIKE * len(more)
    return len(fewer) >= least and len(fewer & more) >= least


def _is_own(slot: Slot, agent: FoundAgent) -> bool:
    """Return whether a value is known from nowhere else."""
    return slot.label.startswith(f"{agent.id}.")


def line(report: Mapping[str, Any]) -> str:
    """Return what `PlainRequests.report` has in one line."""
    return (
        f"plain traffic ({report['mode']}): {report['requests']} requests, {len(report['agents'])} agents known in "
        f"{_share(report['known_agents'], report['requests'])} of them, {report['sessions']} sessions; of "
        f"{report['prompt_tokens']} prompt tokens {report['exact_tokens']} were cached, "
        f"{report['translated_tokens']} translated, and {report['shared_tokens']} read or answered before elsewhere"
    )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "0%"
