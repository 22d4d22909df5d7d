"""All parts of `kedge bench plain`: traces without ids, workflows and teams without a word of the application."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.plain.gain import GainResult, GainSettings, measure_gain
from benchmarks.plain.idle import QUICK_IDLE, IdleResult, IdleSettings, measure_idle
from benchmarks.plain.teams import (
    QUICK_TEAMS,
    GraphScore,
    PlainTeamResult,
    PlainTeamSettings,
    measure_langgraph,
    measure_teams,
)
from benchmarks.sessions.measure import COLUMNS
from benchmarks.workflow.cases import QUICK as SMALL_SHAPE
from kedge.bench.flows import random_tokens
from kedge.bench.sessions.arrivals import Arrival, SessionBenchSettings, SessionTrace, Traffic, load_traces, traffic_of
from kedge.bench.sessions.replay import STOPS
from kedge.discovery import Discovery
from kedge.errors import ConfigError
from kedge.policies.sessions import SessionKey, SessionTracker, StopReason, TurnEnd
from kedge.types import Namespace, RequestId, TenantId

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


LANES = {"stock": "lru", "hinted": "kedge_ids", "plain": "kedge"}
"""Lane -> column of `kedge bench sessions`"""
SHARE = 0.25
"""Capacity over the working set"""


def measure_hits(traffic: Traffic) -> Mapping[str, float]:
    """Return the hit rate of each lane, in shares of all prompt blocks, with a cache of `SHARE` of the working set."""
    capacity = traffic.capacity(SHARE)
    return {lane: round(COLUMNS[column](traffic.arrivals, capacity), 4) for lane, column in LANES.items()}


SPACE = Namespace(TenantId("trace"))
USUAL_SECONDS = 1.0
"""Time to an answer where the trace has none; it always ends before the session's next request"""


@dataclass(frozen=True)
class LinkResult:
    """How many requests were given to which session, and what that took."""

    requests: int
    right: int
    """Given to the session that they continue, or to a new one where they begin one"""
    wrong: int
    """Given to the session of another; what is neither begins a session too many"""
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return the shares of all requests as written to a file of results."""
        shares = {"right": self.right / self.requests, "wrong": self.wrong / self.requests}
        return {"requests": self.requests, **{name: round(share, 4) for name, share in shares.items()}}

    @property
    def us_per_request(self) -> float:
        """Microseconds to find a request's session and to learn from its turn."""
        return 1e6 * self.seconds / self.requests


def measure_links(arrivals: Sequence[Arrival], tracker: SessionTracker | None = None) -> LinkResult:
    """Give arrivals, in the order of time, to sessions, and compare these with the trace's."""
    finder = _Finder(SessionTracker() if tracker is None else tracker)
    owners: dict[SessionKey, str] = {}
    known: set[str] = set()
    counts: Counter[str] = Counter()
    for arrival in arrivals:
        key = finder.arrive(arrival)
        found, true = owners.get(key), arrival.session if arrival.session in known else None
        counts["right" if found == true else "missing" if found is None else "wrong"] += 1
        owners[key] = arrival.session
        known.add(arrival.session)
    return LinkResult(len(arrivals), counts["right"], counts["wrong"], finder.seconds)


class _Finder:
    """The product's session tracker, driven on the arrivals' clock, with the time that it takes."""

    def __init__(self, tracker: SessionTracker) -> None:
        self._tracker = tracker
        self._ends: list[tuple[float, int, SessionKey, Arrival]] = []
        self._count = 0
        self.seconds = 0.0

    def arrive(self, arrival: Arrival) -> SessionKey:
        """Return the session of a request, after the answers that ended before it."""
        began = perf_counter()
        for ended, key, earlier in self._answered(arrival.at):
            stop = STOPS.get(earlier.turn.record.stop, StopReason.UNKNOWN)
            self._tracker.answered(key, earlier.chain, ended, TurnEnd(stop))
        key = self._tracker.arrive(SPACE, arrival.chain, arrival.at)
        self._tracker.advance(arrival.at)
        self.seconds += perf_counter() - began
        self._count += 1
        heappush(self._ends, (_end_of(arrival), self._count, key, arrival))
        return key

    def _answered(self, now: float) -> Iterator[tuple[float, SessionKey, Arrival]]:
        while self._ends and self._ends[0][0] <= now:
            ended, _, key, arrival = heappop(self._ends)
            yield ended, key, arrival


def _end_of(arrival: Arrival) -> float:
    seconds = arrival.turn.record.seconds or USUAL_SECONDS
    return min(arrival.at + seconds, (arrival.at + arrival.next_at) / 2)


Progress = Callable[[str], None]
CASES = ("links", "sessions", "gain", "teams", "langgraph", "idle")
"""Some need packages: OpenAI's client, LangGraph, vLLM."""


@dataclass(frozen=True)
class PlainBenchSettings:
    """The cases and their sizes. Arrivals are composed of a trace's conversations, of which `live` run at once."""

    cases: tuple[str, ...] = CASES
    live: int = 32
    requests: int = 6000
    seed: int = 0
    gain: GainSettings = GainSettings()
    teams: PlainTeamSettings = PlainTeamSettings()
    idle: IdleSettings = IdleSettings()


QUICK = PlainBenchSettings(
    live=8, requests=800, gain=GainSettings(SMALL_SHAPE, "tiny", trials=2), teams=QUICK_TEAMS, idle=QUICK_IDLE
)


@dataclass(frozen=True)
class PlainResult:
    """What was found in each trace and what that costs, and what workflows and teams gain."""

    links: Mapping[str, LinkResult] = field(default_factory=dict)
    discovery: DiscoveryCost = DiscoveryCost()
    gain: Mapping[str, GainResult] = field(default_factory=dict)
    teams: Mapping[str, PlainTeamResult] = field(default_factory=dict)
    langgraph: Mapping[str, Mapping[str, GraphScore]] = field(default_factory=dict)
    sessions: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Hit rates by trace and lane"""
    idle: IdleResult | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        found: dict[str, Any] = {}
        if self.links:
            found["links"] = {name: one.as_json() for name, one in self.links.items()}
            # the costliest trace's
            us = max(one.us_per_request for one in self.links.values())
            found["cost"] = {
                "us_per_request": round(us + self.discovery.us_per_request, 1),
                "us_per_request_sessions": round(us, 1),
                "ns_per_token": round(self.discovery.ns_per_token, 1),
            }
        if self.idle:
            found.setdefault("cost", {}).update(self.idle.as_json())
        if self.gain or self.teams:
            agents = {name: one.agents for name, one in self.gain.items()}
            agents |= {name: one.agents for name, one in self.teams.items()}
            found["agents"] = {name: {"found": here, "true": true} for name, (here, true) in agents.items()}
        if self.gain:
            found["gain"] = {name: one.as_json() for name, one in self.gain.items()}
        if self.teams:
            found["teams"] = {name: one.as_json() for name, one in self.teams.items()}
        if self.langgraph:
            found["langgraph"] = {
                task: {lane: score.as_json() for lane, score in lanes.items()} for task, lanes in self.langgraph.items()
            }
        if self.sessions:
            found["sessions"] = {name: dict(lanes) for name, lanes in self.sessions.items()}
        return found


def measure(files: Sequence[Path], settings: PlainBenchSettings, progress: Progress = lambda _: None) -> PlainResult:
    """Measure all cases. Raises `ConfigError` for an unknown case, or a file that is no trace."""
    for case in settings.cases:
        if case not in CASES:
            raise ConfigError("case", case, f"must be one of {', '.join(CASES)}")
    links = _measure_links(files, settings, progress) if "links" in settings.cases else {}
    sessions = _measure_hits(files, settings, progress) if "sessions" in settings.cases else {}
    gain = measure_gain(settings.gain, progress) if "gain" in settings.cases else {}
    teams = measure_teams(settings.teams, progress) if "teams" in settings.cases else {}
    graphs = measure_langgraph(settings.teams, progress) if "langgraph" in settings.cases else {}
    cost = measure_discovery() if links else DiscoveryCost()
    idle = measure_idle(settings.idle, progress) if "idle" in settings.cases else None
    return PlainResult(links, cost, gain, teams, graphs, sessions, idle)


def _measure_links(files: Sequence[Path], settings: PlainBenchSettings, progress: Progress) -> dict[str, LinkResult]:
    """Replay all traces, each conversation once."""
    found = {}
    for trace in load_traces(files, as_recorded=True):
        progress(trace.name)
        (traffic,) = traffic_of(trace, _replay(trace, settings))
        found[trace.name] = measure_links(traffic.arrivals)
    return found


def _measure_hits(
    files: Sequence[Path], settings: PlainBenchSettings, progress: Progress
) -> dict[str, Mapping[str, float]]:
    """Replay all traces as `kedge bench sessions` does."""
    replay, found = SessionBenchSettings(live=(settings.live,), requests=settings.requests, seed=settings.seed), {}
    for trace in load_traces(files):
        progress(f"{trace.name}: hit rates")
        (traffic,) = traffic_of(trace, replay)
        found[trace.name] = measure_hits(traffic)
    return found


def _replay(trace: SessionTrace, settings: PlainBenchSettings) -> SessionBenchSettings:
    """Return the size of a replay without copies of conversations, whose first prompts would be the same."""
    live = min(settings.live, len(trace.conversations))
    requests = min(settings.requests, sum(map(len, trace.conversations)))
    return SessionBenchSettings(live=(live,), requests=requests, seed=settings.seed)
