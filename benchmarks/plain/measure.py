"""All parts of `kedge bench plain`: traces without ids, workflows and teams without a word of the application."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from benchmarks.sessions.measure import COLUMNS
from benchmarks.workflow.measure import QUICK as SMALL_SHAPE
from benchmarks.workflow.measure import CaseResult, CaseRunner, LanePolicy, WorkflowSettings, cases
from kedge.bench.demo import answer, questions
from kedge.bench.flows import random_tokens
from kedge.bench.sessions.arrivals import Arrival, SessionBenchSettings, SessionTrace, Traffic, load_traces, traffic_of
from kedge.bench.shapes import random_runner
from kedge.discovery import Discovery
from kedge.engine.local.engine import LocalEngine
from kedge.errors import ConfigError
from kedge.guard import GuardMode
from kedge.policies.sessions import SessionKey, SessionTracker, TurnEnd
from kedge.runner.run import tool_result
from kedge.settings import (
    DiscoveryMode,
    DiscoverySettings,
    EngineSettings,
    GuardSettings,
    PlannerSettings,
    ServerSettings,
)
from kedge.types import Namespace, RequestId, ReuseMode, TenantId
from kedge.workflow.graph import Agent
from kedge.workflow.template import parse
from kedge.workloads.base import QUESTION, Question
from kedge.workloads.miniature import TASKS, Task

if TYPE_CHECKING:
    from openai import OpenAI


MODEL = "kedge-nano"
START_S = 60.0
"""Seconds in which a server starts"""


@dataclass(frozen=True)
class PlainTeamSettings:
    """The teams and the number of questions for each."""

    questions: int = 50
    tasks: Sequence[str] = tuple(TASKS)
    seed: int = 0


QUICK_TEAMS = PlainTeamSettings(questions=12, tasks=("choice",))


@dataclass
class PlainScore:
    """A team's calls, and its right answers by agent."""

    right: dict[str, int] = field(default_factory=dict)
    finals: list[str | None] = field(default_factory=list)
    calls: int = 0
    translated_calls: int = 0


@dataclass(frozen=True)
class PlainTeamResult:
    """One team: plain, by dense prefill, and hinted."""

    plain: PlainScore
    dense: PlainScore
    hinted_calls: int
    """Translated calls with hints"""
    agents: tuple[int, int]
    """Agents that were found, and that there are"""

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results; accuracy is that of all agents together."""
        same = sum(a == b for a, b in zip(self.plain.finals, self.dense.finals, strict=True))
        return {
            "calls": self.plain.calls,
            "translated_calls_hinted": self.hinted_calls,
            "translated_calls_plain": self.plain.translated_calls,
            "accuracy_dense": round(sum(self.dense.right.values()) / self.dense.calls, 4),
            "accuracy_plain": round(sum(self.plain.right.values()) / self.plain.calls, 4),
            "same_final_answer": round(same / len(self.plain.finals), 4),
        }


def measure_teams(settings: PlainTeamSettings, progress: Progress) -> dict[str, PlainTeamResult]:
    """Let all teams answer. The results are by task."""
    return {name: _measure_team(TASKS[name], settings, progress) for name in settings.tasks}


def _measure_team(task: Task, settings: PlainTeamSettings, progress: Progress) -> PlainTeamResult:
    asked = questions(task, settings.questions, settings.seed)
    progress(f"{task.name}: hinted")
    with engine_with(DiscoveryMode.OFF) as engine:
        hinted = answer(engine, task, asked, ReuseMode.TRANSLATE, engine.wait_idle)
    with engine_with(DiscoveryMode.TRANSLATE) as engine, client_of(engine) as client:
        plain, dense = _PlainTeam(client, task, {}), _PlainTeam(client, task, {"kedge": {"reuse": "off"}})
        for team in (plain, dense):
            progress(f"{task.name}: {'plain' if team is plain else 'dense'}")
            for question in asked:
                engine.wait_idle()
                team.answer(question)
        figures: Any = engine.inspect()["discovery"]
    calls = sum(one.translated_calls for one in hinted.agents.values())
    return PlainTeamResult(plain.score, dense.score, calls, (figures["agents"], len(task.roles)))


def engine_with(mode: DiscoveryMode) -> LocalEngine:
    """Return an engine that translates whatever it costs: the bundled model is too small to gain by it."""
    planner = PlannerSettings(by_cost=False)
    return LocalEngine(
        config=EngineSettings(
            planner=planner, guard=GuardSettings(mode=GuardMode.OFF), discovery=DiscoverySettings(mode=mode)
        )
    )


@contextmanager
def client_of(engine: LocalEngine) -> Iterator[OpenAI]:
    """Serve an engine on a free port, and yield a client of it."""
    import uvicorn
    from openai import OpenAI

    from kedge.server.app import create_app

    server = uvicorn.Server(
        uvicorn.Config(create_app(engine, ServerSettings(model_name=MODEL)), port=0, log_level="warning")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + START_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise TimeoutError("the server did not start")
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    finally:
        server.should_exit = True
        thread.join(START_S)


@dataclass(frozen=True)
class _PlainTeam:
    """An application that answers questions with a team, by one chat for each agent."""

    client: OpenAI
    task: Task
    extra: Mapping[str, Any]
    """Further fields of its bodies"""
    score: PlainScore = field(default_factory=PlainScore)

    def answer(self, question: Question) -> None:
        values, text = {QUESTION: question.text}, ""
        for agent in self.task.workflow().agents:
            text = self._chat(agent, values)
            right = self.score.right.get(agent.id, 0) + bool(self.task.role(agent.id).correct(text, question))
            self.score.right[agent.id] = right
            values[f"agent_{agent.id}_current"] = text
            if agent.tool:
                values[f"condition_{agent.id}_current"] = tool_result(agent, text, values, "text")
        self.score.finals.append(self.task.final(text))

    def _chat(self, agent: Agent, values: Mapping[str, str]) -> str:
        messages: Any = [
            {"role": role, "content": filled(text, values)}
            for role, text in (("system", agent.system), ("user", agent.user))
        ]
        done = self.client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=agent.max_tokens, extra_body=dict(self.extra)
        )
        self.score.calls += 1
        self.score.translated_calls += (done.model_extra or {})["kedge"]["receipts"][0]["tokens"]["translated"] > 0
        return done.choices[0].message.content or ""


def filled(template: str, values: Mapping[str, str]) -> str:
    return "".join(part if isinstance(part, str) else values[part.name] for part in parse(template))


GAIN_CASES = {"cycle": 5, "flows": 6, "peer": 8}
"""Case -> KVFlow's figure"""
STOCK, HINTED, PLAIN = "stock", "hinted", "plain"
GAIN_LANES = {
    STOCK: LanePolicy(host=False),
    HINTED: LanePolicy("sessions", prefetch=True),
    PLAIN: LanePolicy("sessions", prefetch=True, plain=True),
}


def measure_gain(settings: WorkflowSettings, progress: Progress) -> dict[str, CaseResult]:
    """Run the main case of each figure. The results are by case."""
    runner, tokenizer = random_runner(settings.model_size, settings.device)
    bench, found = CaseRunner(settings, runner, tokenizer, progress), {}
    for name, figure in GAIN_CASES.items():
        progress(name)
        workload = cases(figure, settings.shape, runner.vocab_size, settings.seed, tokenizer.encode)[0]
        found[name] = bench.run(workload, GAIN_LANES)
    return found


def gain_json(case: CaseResult) -> dict[str, Any]:
    """Return the speedups, and the share of the hinted lane's gain that plain traffic has."""
    hinted, plain = (median(case.speedup(lane, STOCK)) for lane in (HINTED, PLAIN))
    share = (plain - 1) / (hinted - 1) if hinted > 1 else None
    return {
        HINTED: round(hinted, 3),
        PLAIN: round(plain, 3),
        "share": share and round(share, 3),
        "latency_s": {name: [round(one.latency_s, 4) for one in trials] for name, trials in case.trials.items()},
        "computed_tokens": {
            name: median(one.counts["computed_tokens"] for one in trials) for name, trials in case.trials.items()
        },
    }


SHORT, LONG = 256, 8192
"""Tokens of the prompts"""
HEAD, NEW = 64, 100
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
    fixed = random_tokens(size - NEW, VOCABULARY, size)
    for number in range(WARM + CALLS):
        question, answer = (random_tokens(NEW, VOCABULARY, size, number, part) for part in range(2))
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
            self._tracker.answered(key, earlier.chain, ended, TurnEnd(earlier.turn.record.stop))
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
CASES = ("links", "sessions", "gain", "teams")
"""The last needs OpenAI's client."""


@dataclass(frozen=True)
class PlainBenchSettings:
    """The cases and their sizes. Arrivals are composed of a trace's conversations, of which `live` run at once."""

    cases: tuple[str, ...] = CASES
    live: int = 32
    requests: int = 6000
    seed: int = 0
    gain: WorkflowSettings = WorkflowSettings(seeds=4)
    teams: PlainTeamSettings = PlainTeamSettings()


SMALL_GAIN = WorkflowSettings(model_size="tiny", seeds=2, shape=SMALL_SHAPE)
QUICK = PlainBenchSettings(live=8, requests=800, gain=SMALL_GAIN, teams=QUICK_TEAMS)


def measure(files: Sequence[Path], settings: PlainBenchSettings, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Measure all cases; return the figures as written to a file of results.

    Raises `ConfigError` for an unknown case, or a file that is no trace.
    """
    for case in settings.cases:
        if case not in CASES:
            raise ConfigError("case", case, f"must be one of {', '.join(CASES)}")
    found: dict[str, Any] = {}
    agents: dict[str, tuple[int, int]] = {}
    if "links" in settings.cases:
        links, discovery = _measure_links(files, settings, progress), measure_discovery()
        found["links"] = {name: one.as_json() for name, one in links.items()}
        us = max(one.us_per_request for one in links.values())  # the costliest trace's
        found["cost"] = {
            "us_per_request": round(us + discovery.us_per_request, 1),
            "us_per_request_sessions": round(us, 1),
            "ns_per_token": round(discovery.ns_per_token, 1),
        }
    if "sessions" in settings.cases:
        found["sessions"] = _measure_hits(files, settings, progress)
    if "gain" in settings.cases:
        gain = measure_gain(settings.gain, progress)
        found["gain"] = {name: gain_json(one) for name, one in gain.items()}
        agents |= {name: (one.agents_found or 0, len(one.workload.prompts)) for name, one in gain.items()}
    if "teams" in settings.cases:
        teams = measure_teams(settings.teams, progress)
        found["teams"] = {name: one.as_json() for name, one in teams.items()}
        agents |= {name: one.agents for name, one in teams.items()}
    if agents:
        found["agents"] = {name: {"found": here, "true": true} for name, (here, true) in agents.items()}
    return found


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
