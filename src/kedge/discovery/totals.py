"""What was found out about plain requests, in figures."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from kedge.discovery.bounds import MAX_OF_ONE
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
    def of(cls, receipt: Receipt) -> Served:
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

    def __add__(self, other: PlainTotals) -> PlainTotals:
        """Return the sum of both."""
        return PlainTotals(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))
