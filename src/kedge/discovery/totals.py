"""What was found out about plain requests, in figures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
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


class WhyNot:
    """How often each reason kept text from being translated. Numbers in a reason make no other one of it."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, reasons: Iterable[str]) -> None:
        """Count the reasons of one request, each once."""
        for reason in {_NUMBER.sub("N", one) for one in reasons}:
            self._counts[reason if reason in self._counts or len(self._counts) < MAX_OF_ONE else OTHERS] += 1

    @staticmethod
    def most_common(several: Iterable[WhyNot]) -> list[tuple[str, int]]:
        """Return all reasons of several with their requests, the most frequent first."""
        return sum((one._counts for one in several), Counter[str]()).most_common()


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
    sessions: int = 0
    """Prompts that another went on with"""
    failures: int = 0
    """Requests about which nothing was found out because of an error in Kedge"""

    def count(self, prompt_tokens: int, shared: int | None) -> None:
        """Count a request with so many tokens of shared text; None where its agent is unknown."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.known_agents += shared is not None
        self.shared_tokens += shared or 0

    def served(self, served: Served) -> None:
        """Count where the tokens of an ended request came from."""
        self.exact_tokens += served.exact
        self.translated_tokens += served.translated

    def __add__(self, other: PlainTotals) -> PlainTotals:
        """Return the sum of both."""
        return PlainTotals(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))
