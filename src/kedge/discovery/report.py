"""What in plain requests' prompts defeats reuse, and what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from heapq import nsmallest
from typing import Any

from kedge.discovery import token_bytes
from kedge.discovery.bounds import MAX_LOOKED_AT, SHORT
from kedge.discovery.found_agents import FoundAgent
from kedge.discovery.templates import Slot

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
