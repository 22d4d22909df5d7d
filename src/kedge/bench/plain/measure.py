"""All parts of `kedge bench plain`: traces without ids, workflows and teams without a word of the application."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kedge.bench.plain.discovery_cost import DiscoveryCost, measure_discovery
from kedge.bench.plain.gain import GainResult, GainSettings, measure_gain
from kedge.bench.plain.hits import measure_hits
from kedge.bench.plain.idle import QUICK_IDLE, IdleResult, IdleSettings, measure_idle
from kedge.bench.plain.langgraph_teams import GraphScore, measure_langgraph
from kedge.bench.plain.links import LinkResult, measure_links
from kedge.bench.plain.teams import QUICK_TEAMS, PlainTeamResult, PlainTeamSettings, measure_teams
from kedge.bench.sessions.cases import SessionBenchSettings, SessionTrace, load_traces, traffic_of
from kedge.bench.workflow.cases import QUICK as SMALL_SHAPE
from kedge.errors import ConfigError

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
