"""What was found out about plain requests, in figures."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class PlainTotals:
    """What was found out since the start."""

    requests: int = 0
    prompt_tokens: int = 0
    known_agents: int = 0
    """Requests whose agent was known"""
    shared_tokens: int = 0
    """Tokens of values that others had or read before"""
    failures: int = 0
    """Requests about which nothing was found out because of an error in Kedge"""

    def count(self, prompt_tokens: int, shared: int | None) -> None:
        """Count a request with so many tokens of shared text; None where its agent is unknown."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.known_agents += shared is not None
        self.shared_tokens += shared or 0

    def __add__(self, other: PlainTotals) -> PlainTotals:
        """Return the sum of both."""
        return PlainTotals(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))
