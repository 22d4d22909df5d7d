"""What finding agents and shared text costs: a part per request and a part per token."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter

from kedge.bench.workflow.figures import random_tokens
from kedge.discovery import Discovery
from kedge.types import RequestId

SHORT, LONG = 256, 8192
"""Tokens of the prompts"""
HEAD, QUESTION = 64, 100
"""Tokens that an agent's prompts begin with, and that differ"""
VOCABULARY = 1 << 17
WARM, CALLS = 6, 60


@dataclass(frozen=True)
class DiscoveryCost:
    """Times of one request whose agent is known; what its prompt has more of is fixed text."""

    us_per_request: float = 0.0
    ns_per_token: float = 0.0


def measure_discovery() -> DiscoveryCost:
    """Time requests with short and with long prompts; their difference is the tokens'."""
    short, long = _seconds(SHORT), _seconds(LONG)
    per_token = max(0.0, long - short) / (LONG - SHORT)
    return DiscoveryCost(1e6 * max(0.0, short - SHORT * per_token), 1e9 * per_token)


def _seconds(size: int) -> float:
    """Return the median seconds of a request, from its arrival to what its answer is remembered for."""
    discovery, times = Discovery(), []
    fixed = random_tokens(size - QUESTION, VOCABULARY, size)
    for number in range(WARM + CALLS):
        question, answer = (random_tokens(QUESTION, VOCABULARY, size, number, part) for part in range(2))
        prompt, request = (*fixed[:HEAD], *question, *fixed[HEAD:]), RequestId(str(number))
        began = perf_counter()
        discovery.arrive(request, prompt, number)
        discovery.ended(request, answer, number + 0.5)
        times.append(perf_counter() - began)
    return median(times[WARM:])
