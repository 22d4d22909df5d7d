"""All parts of `kedge bench plain`: traces without ids, workflows and teams without a word of the application."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import TYPE_CHECKING, Any

from benchmarks.sessions.measure import COLUMNS
from benchmarks.workflow.measure import BLOCK, CaseSizes, Lane, LanePolicy, LaneTrial, cases
from benchmarks.workflow.measure import QUICK as SMALL_SHAPE
from kedge.bench.demo import answer, questions
from kedge.bench.flows import FlowWorkload, random_tokens
from kedge.bench.sessions.arrivals import Arrival, SessionBenchSettings, SessionTrace, Traffic, load_traces, traffic_of
from kedge.bench.sessions.replay import STOPS
from kedge.bench.shapes import random_runner
from kedge.bench.vllm.lane import BLOCK as VLLM_BLOCK
from kedge.bench.vllm.lane import KvRoom, VllmLane
from kedge.bench.vllm.measure import save_model
from kedge.discovery import Discovery
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.engine.local.engine import LocalEngine
from kedge.engine.local.model.runner import ModelRunner
from kedge.errors import ConfigError
from kedge.guard import GuardMode
from kedge.policies.sessions import SessionKey, SessionTracker, StopReason, TurnEnd
from kedge.runner.tools import tool_result
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
from kedge.workloads.miniature import TASKS, Task, workflow

if TYPE_CHECKING:
    from openai import OpenAI


@dataclass(frozen=True)
class IdleSettings:
    """The batches of one-off requests."""

    model_size: str = "32m"
    prompt: int = 512
    """Tokens of a prompt"""
    output: int = 32
    """Tokens of an answer"""
    clients: int = 16
    calls: int = 2
    """Calls of each client in one batch"""
    batches: int = 4
    """Batches of each engine after a start and one that is not counted. Short ones in turn: what else the machine does
    then falls on both alike."""
    starts: int = 6
    """Times that both engines are started"""
    seed: int = 0


QUICK_IDLE = IdleSettings(prompt=128, output=8, clients=4, calls=2, batches=3, starts=2)


Seconds = tuple[list[float], list[float]]
"""Of each batch on stock vLLM, and of the same one with the plug-in"""


@dataclass(frozen=True)
class IdleResult:
    """Throughput with the plug-in over stock's, in each pair of batches of each start."""

    starts: tuple[tuple[float, ...], ...]

    @property
    def medians(self) -> list[float]:
        """The median pair of each start."""
        return [median(pairs) for pairs in self.starts]

    @property
    def share(self) -> float:
        """The median over the starts."""
        return median(self.medians)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The middle half of the starts."""
        lower, _, upper = quantiles(self.medians, n=4, method="inclusive")
        return lower, upper

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        quartiles = [round(one, 4) for one in self.quartiles]
        return {"idle_share": round(self.share, 4), "idle_quartiles": quartiles, "idle_starts": len(self.starts)}


def measure_idle(settings: IdleSettings, progress: Progress) -> IdleResult:
    """Run all batches on both engines."""
    with tempfile.TemporaryDirectory() as folder:
        vocab = save_model(settings.model_size, Path(folder))
        starts = []
        for start in range(settings.starts):
            progress(f"idle: start {start + 1} of {settings.starts}")
            stock, kedge = asyncio.run(_idle_start(settings, Path(folder), vocab, start))
            starts.append(tuple(one / other for one, other in zip(stock, kedge, strict=True)))
    return IdleResult(tuple(starts))


async def _idle_start(settings: IdleSettings, model: Path, vocab: int, start: int) -> Seconds:
    """Start both engines, stock's first at every other start. Returns the seconds of all batches but the first."""
    longest = settings.prompt + settings.output
    room = KvRoom(2 * settings.clients * (longest + VLLM_BLOCK), longest + VLLM_BLOCK)
    plugins: list[dict[str, Any] | None] = [None, {}] if start % 2 == 0 else [{}, None]
    with VllmLane(model, room, plugins[0]) as one, VllmLane(model, room, plugins[1]) as other:
        stock, kedge = sorted((one, other), key=lambda lane: lane.plugged)
        seconds: Seconds = ([], [])
        for number in range(settings.batches + 1):
            pairs = list(zip((stock, kedge), seconds, strict=True))
            for lane, found in pairs if number % 2 else reversed(pairs):
                found.append(await _batch(lane, settings, vocab, start, number))
    return seconds[0][1:], seconds[1][1:]


async def _batch(lane: VllmLane, settings: IdleSettings, vocab: int, *number: int) -> float:
    """Return the seconds that all clients take for their calls."""

    async def client(at: int) -> None:
        for call in range(settings.calls):
            await lane.ask(random_tokens(settings.prompt, vocab, settings.seed, *number, at, call), settings.output)

    began = time.perf_counter()
    await asyncio.gather(*map(client, range(settings.clients)))
    return time.perf_counter() - began


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
        for agent in workflow(self.task).agents:
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
ROUNDS = 10
"""Calls of every agent before plain traffic is measured: after three it is known, after some more who follows whom"""


@dataclass(frozen=True)
class GainSettings:
    """The size of the cases, and how often each lane runs each of them."""

    shape: CaseSizes = CaseSizes()
    model_size: str = "32m"
    trials: int = 4
    load_ratio: float = 0.43
    """Seconds to load a fixed prompt over seconds to compute it."""
    seed: int = 0


@dataclass(frozen=True)
class GainResult:
    """The trials of one case by lane."""

    trials: Mapping[str, Sequence[LaneTrial]]
    agents: tuple[int, int]
    """Agents that were found in plain traffic, and that there are"""

    def speedup(self, lane: str) -> float:
        """Return the median over the trials of how many times as fast as stock a lane was."""
        pairs = zip(self.trials[STOCK], self.trials[lane], strict=True)
        return median(stock.latency_s / ours.latency_s for stock, ours in pairs)

    def as_json(self) -> dict[str, Any]:
        """Return the speedups, and the share of the hinted lane's gain that plain traffic has."""
        hinted, plain = self.speedup(HINTED), self.speedup(PLAIN)
        share = (plain - 1) / (hinted - 1) if hinted > 1 else None
        latencies = {name: [round(one.latency_s, 4) for one in trials] for name, trials in self.trials.items()}
        computed = {
            name: median(one.counts["computed_tokens"] for one in trials) for name, trials in self.trials.items()
        }
        return {
            HINTED: round(hinted, 3),
            PLAIN: round(plain, 3),
            "share": share and round(share, 3),
            "latency_s": latencies,
            "computed_tokens": computed,
        }


def measure_gain(settings: GainSettings, progress: Progress) -> dict[str, GainResult]:
    """Run all cases. The results are by case."""
    runner, tokenizer = random_runner(settings.model_size, "auto")
    found = {}
    for name, figure in GAIN_CASES.items():
        progress(name)
        workload = cases(figure, settings.shape, runner.vocab_size, settings.seed, tokenizer.encode)[0]
        found[name] = _measure(workload, settings, runner, tokenizer, progress)
    return found


def _measure(
    workload: FlowWorkload, settings: GainSettings, runner: ModelRunner, tokenizer: HFTokenizer, progress: Progress
) -> GainResult:
    throttle, lanes = 0.0, dict[str, Lane]()
    longest = max(workload.prompts, key=len)
    with ExitStack() as stack:
        for name, policy in GAIN_LANES.items():
            progress(f"{workload.name}: warming {name}")
            lanes[name] = stack.enter_context(Lane(policy, workload, runner, tokenizer, throttle=throttle))
            rounds = ROUNDS if policy.plain else 1
            lanes[name].warm(rounds, skipped=ROUNDS - rounds)  # all lanes go on with the same prompts
            if not throttle:
                throttle = settings.load_ratio * lanes[name].prefill_s(longest) / -(-len(longest) // BLOCK)
        trials: dict[str, list[LaneTrial]] = {name: [] for name in lanes}
        for number in range(settings.trials):
            order = [*lanes][number % 3 :] + [*lanes][: number % 3]
            for name in order:
                progress(f"{workload.name}: {name}, trial {number + 1} of {settings.trials}")
                trials[name].append(lanes[name].trial())
        figures: Any = lanes[PLAIN].engine.inspect()["discovery"]
    return GainResult(trials, (figures["agents"], len(workload.prompts)))


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
CASES = ("links", "sessions", "gain", "teams", "idle")
"""Some need packages: OpenAI's client, vLLM."""


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
        found["gain"] = {name: one.as_json() for name, one in gain.items()}
        agents |= {name: one.agents for name, one in gain.items()}
    if "teams" in settings.cases:
        teams = measure_teams(settings.teams, progress)
        found["teams"] = {name: one.as_json() for name, one in teams.items()}
        agents |= {name: one.agents for name, one in teams.items()}
    if agents:
        found["agents"] = {name: {"found": here, "true": true} for name, (here, true) in agents.items()}
    if "idle" in settings.cases:
        found.setdefault("cost", {}).update(measure_idle(settings.idle, progress).as_json())
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
