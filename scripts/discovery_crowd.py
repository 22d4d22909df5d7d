"""A crowd of requests that have nothing to do with each other, against `kedge.discovery` alone: time and memory.

    python scripts/discovery_crowd.py --count 1000000

Half of the prompts are random, the other half begin with one of a hundred fixed prompts, and every tenth is sent again
with an answer and more text behind it, as a session's next turn is. No model runs. The time is that of finding out
about a request and taking its answer; making up the prompts is not part of it. Memory is the process's resident set.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from resource import getpagesize

import numpy as np

from kedge.discovery import PlainRequests
from kedge.settings import DiscoveryMode, DiscoverySettings
from kedge.types import GenerateRequest, Segment, Tokens

VOCABULARY, HEADS = 100_000, 100
HEAD, ANSWER = 128, 48
"""Tokens of a fixed prompt, and of an answer"""


@dataclass(frozen=True)
class CrowdFigures:
    """The figures after some requests."""

    requests: int
    us_per_request: float
    """Mean since the figures before"""
    resident_mb: float
    agents: int
    sessions: int


def crowd(count: int, tokens: int, every: int, seed: int = 0) -> Iterator[CrowdFigures]:
    """Send `count` requests of about `tokens` tokens, and yield the figures after each `every` of them."""
    rng, clock = np.random.default_rng(seed), Clock()
    heads = rng.integers(VOCABULARY, size=(HEADS, HEAD))
    plain = PlainRequests(DiscoverySettings(mode=DiscoveryMode.TRANSLATE), lambda: clock.now)
    spent, history = 0.0, np.zeros(0, int)
    for number in range(1, count + 1):
        prompt = rng.integers(VOCABULARY, size=tokens)
        if number % 10 == 0:
            prompt = np.concatenate([history, prompt[:ANSWER]])
        elif number % 2:
            prompt[:HEAD] = heads[rng.integers(HEADS)]
        answer, history = rng.integers(VOCABULARY, size=ANSWER), prompt[: 2 * tokens]
        clock.now += 0.01
        spent += _ask(plain, tuple(prompt.tolist()), answer.tolist())
        if number % every == 0 or number == count:
            since = (number - 1) % every + 1
            known = plain.report()
            totals = plain.totals
            yield CrowdFigures(number, 1e6 * spent / since, resident_mb(), len(known["agents"]), totals.sessions)
            spent = 0.0


class Clock:
    """Seconds of the crowd's own time."""

    now = 0.0


def _ask(plain: PlainRequests, prompt: Tokens, answer: list[int]) -> float:
    """Return the seconds that a request and its answer take."""
    request = GenerateRequest((Segment(prompt, "p0"),), is_plain=True)
    began = time.perf_counter()
    plain.arrived(request)
    plain.ended(request.namespace, request.request_id, answer)
    plain.forecasts.take()
    return time.perf_counter() - began


def resident_mb() -> float:
    """Return the resident set of this process in MB."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * getpagesize() / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="A crowd of requests that have nothing to do with each other.")
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    for figures in crowd(given.count, given.tokens, max(1, given.count // 10)):
        rows.append(asdict(figures))
        print(
            f"{figures.requests:>9,} requests: {figures.us_per_request:6.1f} us each, {figures.resident_mb:7.1f} MB, "
            f"{figures.agents} agents reported, {figures.sessions} sessions",
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
