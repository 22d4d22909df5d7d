"""All parts of `kedge bench plain` that replay traces."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from kedge.bench.plain.links import LinkResult, measure_links
from kedge.bench.sessions.cases import SessionBenchSettings, SessionTrace, load_traces, traffic_of
from kedge.structures.prefixes import chain_of

PROMPT_TOKENS, BLOCK_TOKENS, REPEATS = 20_000, 16, 9
"""Size of the prompt whose hashing is timed, and how often"""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class PlainBenchSettings:
    """The size of the replays: arrivals are composed of a trace's conversations, of which `live` run at once."""

    live: int = 32
    requests: int = 6000
    seed: int = 0


QUICK = PlainBenchSettings(live=8, requests=800)


@dataclass(frozen=True)
class PlainResult:
    """What was found in each trace, and what that costs."""

    links: Mapping[str, LinkResult]
    ns_per_token: float
    """Nanoseconds to hash a token of a prompt, which vLLM has done by itself"""

    @property
    def us_per_request(self) -> float:
        """Microseconds per request of the costliest trace."""
        return max(one.us_per_request for one in self.links.values())

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        cost = {"us_per_request": round(self.us_per_request, 1), "ns_per_token": round(self.ns_per_token, 1)}
        return {"links": {name: one.as_json() for name, one in self.links.items()}, "cost": cost}


def measure(files: Sequence[Path], settings: PlainBenchSettings, progress: Progress = lambda _: None) -> PlainResult:
    """Replay all traces, each conversation once. Raises `ConfigError` for a file that is no trace."""
    found = {}
    for trace in load_traces(files, as_recorded=True):
        progress(trace.name)
        (traffic,) = traffic_of(trace, _replay(trace, settings))
        found[trace.name] = measure_links(traffic.arrivals)
    return PlainResult(found, _ns_per_token())


def _replay(trace: SessionTrace, settings: PlainBenchSettings) -> SessionBenchSettings:
    """Return the size of a replay without copies of conversations, whose first prompts would be the same."""
    live = min(settings.live, len(trace.conversations))
    requests = min(settings.requests, sum(map(len, trace.conversations)))
    return SessionBenchSettings(live=(live,), requests=requests, seed=settings.seed)


def _ns_per_token() -> float:
    rng = random.Random(0)
    tokens = [rng.randrange(1 << 17) for _ in range(PROMPT_TOKENS)]
    times = []
    for _ in range(REPEATS):
        began = perf_counter()
        chain_of(tokens, BLOCK_TOKENS)
        times.append(perf_counter() - began)
    return 1e9 * median(times) / PROMPT_TOKENS
