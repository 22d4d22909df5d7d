"""What in an application's prompts defeats reuse, and what mending it would save: a linter that reads traffic."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from heapq import nsmallest

from kedge.discovery import token_bytes
from kedge.discovery.found_agents import FoundAgent
from kedge.discovery.templates import PromptTemplate, Slot
from kedge.types import AgentId

LEAST_TOKENS = 32
"""Tokens of a call that mending saves, from which on it is worth a word"""
SHORT_VALUE = 32
"""Tokens of a value, at most, that may stand in the middle of fixed text, such as a time or a name"""
ALIKE = 0.9
"""Share of their tokens that two fixed prompts have in common if they are the same in another order"""
LEAST_MOVED = 8
"""Tokens that stand elsewhere in another fixed prompt, from which on that has another order"""
MAX_COMPARED = 64
"""Agents that are compared with each other"""
SAMPLE = 64
"""Tokens of a text that tell whether comparing all of them is worth the time"""
SPREAD = 2_654_435_761
"""Knuth's multiplier: a sample is of all tokens, not of those with low numbers"""


class FindingKind(StrEnum):
    """What was found."""

    EARLY_VALUE = "a value in the middle of fixed text"
    ROLE_FIRST = "a role before shared text"
    ANOTHER_ORDER = "the same fixed text in another order"
    COMMON_BEHIND = "fixed text that another agent has too, behind another beginning"


ADVICE = {
    FindingKind.EARLY_VALUE: "put what changes, such as a time or a name, behind all that stays",
    FindingKind.ROLE_FIRST: "where the model allows it, put the shared text first and the role behind it",
    FindingKind.ANOTHER_ORDER: "keep tools and rules in one order, for instance by name",
    FindingKind.COMMON_BEHIND: "put what agents have in common first, and behind it what tells them apart",
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
    found = [*_early_values(agents), *_roles_first(agents), *_alike_heads(agents)]
    worth = [one for one in found if one.tokens >= LEAST_TOKENS]
    return sorted(worth, key=lambda one: one.tokens * one.calls, reverse=True)


def _early_values(agents: Sequence[FoundAgent]) -> Iterator[Finding]:
    """Yield the agents with a short value of their own, and much fixed text between it and the next one."""
    for agent in agents:
        slots = agent.templates[0].slots
        behind = token_bytes.size(slots[0].after)
        if len(slots) > 1 and _is_own(slots[0], agent) and token_bytes.size(slots[0].first) <= SHORT_VALUE:
            yield Finding(FindingKind.EARLY_VALUE, agent.id, behind, agent.calls)


def _roles_first(agents: Sequence[FoundAgent]) -> Iterator[Finding]:
    """Yield the agents that read what another reads too, behind another beginning."""
    readers = Counter(slot.label for agent in agents for slot in agent.templates[0].slots)
    for agent in agents:
        first = _first_shared(agent.templates[0], readers)
        if first is not None and not _is_own(first, agent):
            yield Finding(FindingKind.ROLE_FIRST, agent.id, token_bytes.size(first.first), agent.calls)


def _first_shared(template: PromptTemplate, readers: Counter[str]) -> Slot | None:
    return next((slot for slot in template.slots if readers[slot.label] > 1), None)


def _alike_heads(agents: Sequence[FoundAgent]) -> Iterator[Finding]:
    """Yield the agents whose fixed prompt is nearly that of an agent with more calls."""
    heads = [agent.templates[0].head for agent in agents[:MAX_COMPARED]]
    samples = [_sample(head) for head in heads]
    for at, (agent, head) in enumerate(zip(agents, heads, strict=False)):
        likely = (heads[one] for one in range(at) if 2 * len(samples[one] & samples[at]) >= len(samples[at]))
        if other := next((one for one in likely if _alike(one, head)), None):
            lost = max(map(token_bytes.size, (other, head))) - token_bytes.common_head((other, head))
            kind = FindingKind.ANOTHER_ORDER if _is_reordered(other, head) else FindingKind.COMMON_BEHIND
            yield Finding(kind, agent.id, lost, agent.calls)


@lru_cache(MAX_COMPARED)  # a report is made every few seconds, and what agents begin with stays
def _sample(text: bytes) -> frozenset[int]:
    """Return some of a text's tokens, the same ones of texts with the same tokens (a bottom-k sketch)."""
    return frozenset(nsmallest(SAMPLE, set(token_bytes.unpack(text)), key=lambda token: token * SPREAD % (1 << 32)))


def _alike(one: bytes, other: bytes) -> bool:
    """Return whether two texts have nearly all of their tokens in common, in whatever order."""
    counts = [Counter(token_bytes.unpack(text)) for text in (one, other)]
    return (counts[0] & counts[1]).total() >= ALIKE * max(map(token_bytes.size, (one, other)))


@lru_cache(MAX_COMPARED)
def _is_reordered(one: bytes, other: bytes) -> bool:
    """Return whether some tokens that two texts have once each do not follow each other in both as the rest do."""
    tokens = [token_bytes.unpack(text) for text in (one, other)]
    counts, place = [Counter(each) for each in tokens], {token: at for at, token in enumerate(tokens[1])}
    places = [place[token] for token in tokens[0] if counts[0][token] == counts[1][token] == 1]
    chain: list[int] = []  # the least ends of rising chains of each length: the longest one is what is in order
    for at in places:
        end = bisect_left(chain, at)
        chain[end : end + 1] = [at]
    return len(places) - len(chain) >= LEAST_MOVED


def _is_own(slot: Slot, agent: FoundAgent) -> bool:
    """Return whether a value is known from nowhere else."""
    return slot.label.startswith(f"{agent.id}.")
