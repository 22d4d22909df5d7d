"""What was found out about plain requests, in figures, and what in their prompts defeats reuse."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from heapq import nsmallest
from typing import Any, NamedTuple, Self

from kedge.discovery.bounds import MAX_LOOKED_AT, MAX_OF_ONE, SHORT
from kedge.discovery.found_agents import FoundAgent
from kedge.discovery.templates import Slot
from kedge.structures import token_bytes
from kedge.types import Receipt

OTHERS = "other reasons"
"""What reasons beyond `MAX_OF_ONE` are counted as"""
_NUMBER = re.compile(r"\d[\d.,]*")


class Served(NamedTuple):
    """Where the tokens of a prompt came from."""

    exact: int
    """Tokens from a prefix cache, on the device or in host memory"""
    translated: int
    reasons: tuple[str, ...] = ()
    """Why others were not translated"""

    @classmethod
    def of(cls, receipt: Receipt) -> Self:
        """Return what a receipt says."""
        return cls(receipt.exact, receipt.translated, tuple(miss.reason for miss in receipt.misses))


@dataclass(slots=True)
class PlainTotals:
    """What was found out since the start."""

    requests: int = 0
    prompt_tokens: int = 0
    known_agents: int = 0
    """Requests whose agent was known"""
    shared_tokens: int = 0
    """Tokens of values that others had or read before"""
    exact_tokens: int = 0
    """Prompt tokens from a prefix cache"""
    translated_tokens: int = 0
    turns: int = 0
    """Prompts that go on where an earlier one ended"""
    failures: int = 0
    """Requests about which nothing was found out because of an error in Kedge"""
    why_not: Counter[str] = field(default_factory=Counter)
    """Requests by each reason that kept text of theirs from being translated. Numbers in it make no other one of it."""

    def count(self, prompt_tokens: int, shared: int | None) -> None:
        """Count a request with so many tokens of shared text; None where its agent is unknown."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.known_agents += shared is not None
        self.shared_tokens += shared or 0

    def served(self, served: Served) -> None:
        """Count where the tokens of an ended request came from, and each reason once."""
        self.exact_tokens += served.exact
        self.translated_tokens += served.translated
        for reason in {_NUMBER.sub("N", one) for one in served.reasons}:
            self.why_not[reason if reason in self.why_not or len(self.why_not) < MAX_OF_ONE else OTHERS] += 1

    def to_dict(self) -> dict[str, int]:
        """Return the numbers as plain data, the reasons apart."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "why_not"}

    def __add__(self, other: Self) -> Self:
        """Return the sum of both."""
        return type(self)(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


# what defeats reuse ---------------------------------------------------------------------------------------------------

ALIKE = 0.9
"""Share of their tokens that two fixed prompts have in common if one could share most of the other"""
EARLY_VALUE = "a value in the middle of fixed text"
ROLE_FIRST = "a role before shared text"
COMMON_TEXT = "fixed text of another agent in another order, or behind another beginning"
ADVICE = {
    EARLY_VALUE: "put what changes, such as a time or a name, behind all that stays",
    ROLE_FIRST: "where the model allows it, put the shared text first and the role behind it",
    COMMON_TEXT: "put what agents have in common first, tools in one order, and what tells them apart last",
}
"""What was found -> what to do about it"""


def find_waste(agents: Sequence[FoundAgent]) -> list[dict[str, Any]]:
    """Return as plain data where prompts of some agents could share more, what saves the most first.

    `tokens_per_call` are the tokens of each of the agent's calls that would come from the cache.
    """
    found: list[tuple[str, FoundAgent, int]] = []
    readers = Counter(slot.label for agent in agents for slot in agent.templates[0].slots)
    for agent in agents:
        slots = agent.templates[0].slots
        # A short value of its own, and much fixed text between it and the next one.
        if len(slots) > 1 and _is_own(slots[0], agent) and token_bytes.size(slots[0].first) <= SHORT:
            found.append((EARLY_VALUE, agent, token_bytes.size(slots[0].after)))
        # A text that another reads too, behind another beginning.
        first = next((slot for slot in slots if readers[slot.label] > 1), None)
        if first is not None and not _is_own(first, agent):
            found.append((ROLE_FIRST, agent, token_bytes.size(first.first)))
    # A fixed prompt that is nearly that of an agent with more calls.
    heads = [agent.templates[0].head for agent in agents[:MAX_LOOKED_AT]]
    samples = [_sample(head) for head in heads]
    for at, (agent, head) in enumerate(zip(agents, heads, strict=False)):
        likely = (heads[one] for one in range(at) if 2 * len(samples[one] & samples[at]) >= len(samples[at]))
        if other := next((one for one in likely if _alike(one, head)), None):
            lost = max(map(token_bytes.size, (other, head))) - token_bytes.common_head((other, head))
            found.append((COMMON_TEXT, agent, lost))
    worth = [one for one in found if one[2] >= SHORT]
    return [
        {"kind": kind, "agent": agent.id, "tokens_per_call": tokens, "calls": agent.calls, "advice": ADVICE[kind]}
        for kind, agent, tokens in sorted(worth, key=lambda one: one[2] * one[1].calls, reverse=True)
    ]


@lru_cache(MAX_LOOKED_AT)  # a report is made every few seconds, and what agents begin with stays
def _sample(text: bytes) -> frozenset[int]:
    """Return some of a text's tokens, the same ones of texts with the same tokens (a bottom-k sketch): they tell
    whether comparing all is worth the time of the engine's thread. They are chosen by their hashes, so that a sample is
    of all tokens, not of those with low numbers.
    """
    return frozenset(nsmallest(MAX_LOOKED_AT, set(token_bytes.unpack(text)), key=lambda token: hash((token,))))


def _alike(one: bytes, other: bytes) -> bool:
    """Return whether two texts have nearly all of their tokens in common, in whatever order."""
    counts = [Counter(token_bytes.unpack(text)) for text in (one, other)]
    return (counts[0] & counts[1]).total() >= ALIKE * max(map(token_bytes.size, (one, other)))


def _is_own(slot: Slot, agent: FoundAgent) -> bool:
    """Return whether a value is known from nowhere else."""
    return slot.label.startswith(f"{agent.id}.")
