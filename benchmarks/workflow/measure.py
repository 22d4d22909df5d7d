"""Workflow-aware caching against its baselines, on a real model with real KV (KVFlow, figures 5, 6 and 8).

All policies run in one process on the same engine code with the same prompts. They take turns, trial by trial and each
time in another order, so that other load on the machine hits all of them alike. A trial has new dynamic parts; the
fixed prompts are warm. The copies between the tiers are slowed down until loading a prompt costs the wanted share of
computing it, as measured on this machine before the trials; the ratio during the trials is in the results.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal

from kedge.bench.flows import TENANT, Flow, FlowWorkload, Sizes, cycle, percentile, single_flow, spread, synthetic_flow
from kedge.bench.shapes import random_runner
from kedge.cache.node import TreeNode
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.engine.local.engine import LocalEngine
from kedge.engine.local.model.runner import ModelRunner
from kedge.errors import ConfigError
from kedge.settings import DiscoveryMode, DiscoverySettings, EngineSettings, ThrottledTiers
from kedge.types import (
    AgentId,
    Completion,
    GenerateRequest,
    Namespace,
    ReuseMode,
    RunId,
    RunKey,
    SamplingParams,
    Segment,
    Tokens,
    new_request_id,
)
from kedge.workflow.forecast import Changes, ForecastBoard, RunProgress
from kedge.workflow.step_graph import Node, StepGraph
from kedge.workflow.steps import NextRun


def many_flows(sizes: Sizes, flows: int, room: int, vocab: int, seed: int, *, agents: int = 5) -> FlowWorkload:
    """Return figure 6: independent concurrent workflows, each with agents and prompts of its own."""
    made = tuple(synthetic_flow(f"flow-{i}", agents, sizes, vocab, seed) for i in range(flows))
    return FlowWorkload(f"{sizes}, {flows} workflows", made, room, agents, 1)


def unpressed(sizes: Sizes, vocab: int, seed: int) -> FlowWorkload:
    """Return a cycle with room for all agents and more."""
    made = single_flow(sizes, vocab, seed, room=12)
    return replace(made, name="no pressure")


def random_order(sizes: Sizes, vocab: int, seed: int) -> FlowWorkload:
    """Return a cycle by the graph whose agents are in fact called in random order."""
    made = single_flow(sizes, vocab, seed)
    flow = replace(made.flows[0], path=lambda turn: f"a{Random(f'{seed}/{turn}').randrange(10)}")
    return replace(made, name="random order", flows=(flow,))


def branching(branches: int, sizes: Sizes, vocab: int, seed: int, *, agents: int = 8) -> FlowWorkload:
    """Return stages of `branches` agents of which a random one is called, with room for half of all agents."""
    stages = agents // branches

    def path(turn: int) -> str:
        return f"a{turn % stages * branches + Random(f'{seed}/{turn}').randrange(branches)}"

    flow = replace(synthetic_flow("flow", agents, sizes, vocab, seed, path), graph=cycle(stages, branches))
    return FlowWorkload(f"{branches} branches", (flow,), agents // 2 * sizes.call, agents, 2)


NUMBERS = (5, 6, 8)


@dataclass(frozen=True)
class CaseSizes:
    """Sizes of the workloads.

    The paper's are 8192/32/32 for figure 5, and for figure 6 512 or 1024 fixed tokens for 20, 10, 128 or 64 workflows
    with 256 new tokens and answers of 256.

    An answer's token costs a small model on a CPU a larger share of a prefill than a large model on a GPU, so answers
    are shorter here: on an idle machine a call that finds its fixed prompt costs about 0.4 of computing that prompt.
    """

    sizes: Sizes = Sizes()
    """Figure 5."""
    rooms: tuple[int, ...] = (4, 3, 5)
    """Figure 5: agents, of ten, that the device has room for; the first is the main case."""
    flows: tuple[tuple[int, int], ...] = ((512, 16), (256, 32), (512, 3), (256, 5))
    """Figure 6: fixed tokens and number of workflows; the first is the main case."""
    new: int = 32
    """Figure 6: new tokens of a call."""
    reply: int = 16
    """Figure 6: tokens of an answer."""
    room: int = 16 * 3 * 560
    """Figure 6: tokens of the device tier."""
    answer: int = 32
    """Figure 8: tokens of an answer."""
    questions: int = 2
    """Figure 8: questions of every team in one trial."""


QUICK = CaseSizes(
    sizes=Sizes(1024, 32, 8), rooms=(4,), flows=((256, 8),), new=16, reply=16, room=8 * 3 * 288, answer=8, questions=1
)
"""Fewer tokens and one case per figure."""


@dataclass(frozen=True)
class Control:
    """A case without anything to gain; `hints` returns the filter of forecasts for one engine."""

    workload: FlowWorkload
    hints: Callable[[], Hints] = lambda: true_hints


def cases(figure: int, shape: CaseSizes, vocab: int, seed: int, encode: Encode) -> list[FlowWorkload]:
    """Return the cases of a figure, its main case first. Raises `ConfigError` for an unknown figure."""
    if figure == 5:
        return [single_flow(shape.sizes, vocab, seed, room=room) for room in shape.rooms]
    if figure == 6:
        return [
            many_flows(Sizes(fixed, shape.new, shape.reply), flows, shape.room, vocab, seed)
            for fixed, flows in shape.flows
        ]
    if figure == 8:
        return [peer(encode, seed, output=shape.answer, rounds=shape.questions)]
    raise ConfigError("figure", figure, f"must be one of {', '.join(map(str, NUMBERS))}")


def controls(shape: CaseSizes, vocab: int, seed: int) -> dict[str, Control]:
    """Return the controls of figure 5 by name. In none of them may Kedge be slower than LRU."""
    sizes = replace(shape.sizes, fixed=shape.sizes.fixed // 2)
    cyclic = single_flow(sizes, vocab, seed)
    wrong = {
        f"{share:.0%} wrong hints": Control(cyclic, lambda share=share: WrongHints(share, 10, seed))  # type: ignore[misc]
        for share in (0.1, 0.5, 1.0)
    }
    branches = {f"{n} branches": Control(branching(n, sizes, vocab, seed)) for n in (1, 2, 4)}
    return {
        "no pressure": Control(unpressed(sizes, vocab, seed)),
        "no hints": Control(cyclic, lambda: no_hints),
        **wrong,
        "random order": Control(random_order(sizes, vocab, seed)),
        **branches,
    }


Encode = Callable[[str], Tokens]
EXAMPLES = 6
"""Worked examples in every agent's prompt."""

RULES = """You work in the research team of a bank. Answer in plain words. Name the figure, its unit and the date that
it is of. Say what you do not know. Never advise anyone to buy or to sell. Round money to whole millions and ratios to
one decimal. Where two sources disagree, give both and say which one is newer. Do not repeat the question. Keep to your
own task; your colleagues do theirs.
"""
DESKS = {
    "equities": "Your desk follows listed companies: their reports, their margins, their debt and their share price.",
    "bonds": "Your desk follows bonds: coupons, yields, maturities, ratings and what a change of rates does.",
    "funds": "Your desk follows funds: what they hold, what they cost, how they did against their index and why.",
}
ROLES = {
    "planner": "You are the Planner. Split the question into at most three smaller ones that can be looked up. Give "
    "one line to each, the most important first, and no answers.",
    "executor": "You are the Executor. For each line of the plan say what a report or a price list tells about it. "
    "Give the numbers with their dates, one line each, without a conclusion.",
    "expresser": "You are the Expresser. Write one paragraph for the customer from what the Executor found. Begin with "
    "the answer, then give the reasons, then what could change it.",
    "reviewer": "You are the Reviewer. Compare the paragraph with the question and the figures. Name each number that "
    "is missing, wrong or without a date, and say whether the answer may go out.",
}
COMPANIES = ("Alder Mills", "Brook Steel", "Cedar Foods", "Dune Energy", "Elm Rail", "Fjord Shipping", "Gale Wind")
FIGURES = ("operating margin", "net debt", "free cash flow", "dividend", "order book", "interest cover", "revenue")
FRAMES = (
    "How did the {figure} of {company} change in {year}, and why?",
    "Is the {figure} of {company} better than that of {other} in {year}?",
    "What would a rise of rates by {points} points do to the {figure} of {company}?",
    "Which risks to the {figure} of {company} did its report of {year} name?",
)


def question(rng: Random) -> str:
    """Return a random customer's question."""
    company, other = rng.sample(COMPANIES, 2)
    frame, figure = rng.choice(FRAMES), rng.choice(FIGURES)
    return frame.format(
        company=company, other=other, figure=figure, year=rng.randrange(2015, 2025), points=rng.randrange(1, 5)
    )


def fixed_prompt(desk: str, role: str) -> str:
    """Return the part that is the same in every call of one agent."""
    rng = Random(f"{desk}/{role}")
    examples = (f"Question {i + 1}: {question(rng)} Points to look at: {question(rng)}" for i in range(EXAMPLES))
    return "\n".join((RULES, DESKS[desk], ROLES[role], *examples, ""))


def team(name: str, desk: str, encode: Encode, output: int, seed: int) -> Flow:
    """Return one team; every question goes around once."""
    names = tuple(ROLES)
    nodes = (Node(names[0], loops=[names[-1]]), *(Node(b, after=[a]) for a, b in zip(names, names[1:], strict=False)))
    return Flow(
        run=RunKey(Namespace(TENANT), name, RunId("run")),
        graph=StepGraph("peer", nodes),
        fixed={AgentId(role): encode(fixed_prompt(desk, role)) for role in names},
        path=lambda turn: names[turn % len(names)],
        dynamic=lambda turn: encode(f"Question: {question(Random(f'{seed}/{name}/{turn // len(names)}'))}\n"),
        output=output,
        reads_answer=True,
    )


def peer(encode: Encode, seed: int, *, output: int, rounds: int, share: float = 0.5) -> FlowWorkload:
    """Return one team for every desk, all at once; the device has room for `share` of their fixed prompts."""
    flows = tuple(team(desk, desk, encode, output, seed) for desk in DESKS)
    tokens = sum(len(prompt) for flow in flows for prompt in flow.fixed.values())
    return FlowWorkload(f"PEER, {len(flows)} teams", flows, int(share * tokens), rounds * len(ROLES), len(ROLES))


BLOCK = 16
"""Tokens of a block."""
CALIBRATIONS = 7
"""Prefills whose median is the cost of computing a prompt."""
HORIZON = 200
"""Turns that the oracle looks ahead."""

Hints = Callable[[Changes], Changes]
"""A filter of forecasts between client and engine."""


@dataclass(frozen=True)
class LanePolicy:
    """A lane's use of the forecast. Without a host tier, evicted KV is computed again."""

    evict: Literal["lru", "sessions", "belady"] = "lru"
    host: bool = True
    prefetch: bool = False
    status_aware: bool = True
    """Whether a request that waits for a load lets others go first."""


POLICIES: Mapping[str, LanePolicy] = {
    "lru_device": LanePolicy(host=False),
    "lru_host": LanePolicy(),
    "lru_blocking": LanePolicy(status_aware=False),
    "evict_only": LanePolicy("sessions"),
    "prefetch_only": LanePolicy(prefetch=True),
    "full": LanePolicy("sessions", prefetch=True),
    "belady": LanePolicy("belady"),
}
"""All but the first have a host tier. Without prefetching it is reactive: a request waits for its load, and with
`lru_blocking` those behind it wait too."""


def true_hints(changes: Changes) -> Changes:
    """Return the forecast unchanged."""
    return changes


def no_hints(changes: Changes) -> Changes:  # noqa: ARG001 (a filter's signature)
    """Return an empty forecast."""
    return {}


class WrongHints:
    """A filter that replaces a share of the forecast by random steps."""

    def __init__(self, share: float, agents: int, seed: int) -> None:
        self._share, self._agents, self._rng = share, agents, Random(seed)

    def __call__(self, changes: Changes) -> Changes:
        return {key: self._drawn(next_run) for key, next_run in changes.items()}

    def _drawn(self, next_run: NextRun | None) -> NextRun | None:
        is_wrong = next_run is not None and self._rng.random() < self._share
        return NextRun(float(self._rng.randrange(self._agents))) if is_wrong else next_run


class Oracle:
    """The next use of every node: the turn in which an agent is called whose fixed prompt begins with it.

    Several flows are assumed to be in step.
    """

    def __init__(self, flows: tuple[Flow, ...]) -> None:
        self._flows = flows
        self._fixed = [{agent: array("i", tokens).tobytes() for agent, tokens in flow.fixed.items()} for flow in flows]
        self._turns = [-1] * len(flows)

    def started(self, flow: int, turn: int) -> None:
        """Record that `turn` of a flow is under way: what it uses is next used after it."""
        self._turns[flow] = turn

    def next_use(self, node: TreeNode) -> float:
        """Return the turn in which `node` is used next, `inf` beyond `HORIZON` turns."""
        prefix = node.prefix()
        return min((self._next_turn(at, prefix) for at in range(len(self._flows))), default=math.inf)

    def evicting(self, node: TreeNode) -> tuple[float, float]:
        """Evict first what is used again last."""
        return -self.next_use(node), node.last_access

    def _next_turn(self, at: int, prefix: bytes) -> float:
        users = {agent for agent, fixed in self._fixed[at].items() if fixed.startswith(prefix)}
        turns = range(self._turns[at] + 1, self._turns[at] + 1 + (HORIZON if users else 0))
        return next((float(turn) for turn in turns if self._flows[at].agent(turn) in users), math.inf)


@dataclass(frozen=True)
class LaneTrial:
    """All flows' completions in one trial, and the cache's counters during it."""

    latency_s: float
    """From the start of the first call to the end of the last one."""
    calls: tuple[tuple[Completion, ...], ...]
    """Completions by flow."""
    counts: Mapping[str, float]

    @property
    def tokens(self) -> list[Tokens]:
        """All answers."""
        return [call.tokens for calls in self.calls for call in calls]

    @property
    def completions(self) -> list[Completion]:
        """All completions."""
        return [call for calls in self.calls for call in calls]


class FlowClient:
    """A client that calls the agents of one flow one after the other and sends the engine its forecasts."""

    def __init__(self, engine: LocalEngine, flow: Flow, hints: Hints, on_turn: Callable[[int], None]) -> None:
        self._engine, self._flow, self._hints, self._on_turn = engine, flow, hints, on_turn
        self._progress = RunProgress(flow.graph, flow.run, ForecastBoard())
        self._answer: Tokens = ()
        self._send(self._progress.begin(0.0))

    def call(self, turn: int) -> Completion:
        """Make the call of one turn and wait for its end."""
        agent = self._flow.agent(turn)
        self._on_turn(turn)
        self._send(self._progress.started(agent, float(turn)))
        done = self._engine.submit(self._flow.request(turn, self._answer)).result()
        self._send(self._progress.finished(agent, float(turn)))
        self._answer = done.tokens
        return done

    def _send(self, changes: Changes) -> None:
        self._engine.forecast(self._hints(changes))


class Lane(AbstractContextManager["Lane"]):
    """An engine with one policy, and the clients of a workload. Lanes take turns and keep their state."""

    def __init__(
        self,
        policy: LanePolicy,
        workload: FlowWorkload,
        runner: ModelRunner,
        tokenizer: HFTokenizer,
        *,
        throttle: float,
        hints: Hints = true_hints,
    ) -> None:
        """Open the engine. `throttle`: seconds that a block takes from one tier to the other."""
        oracle = Oracle(workload.flows)
        evict: Any = oracle.evicting if policy.evict == "belady" else None
        self.engine = LocalEngine.from_runner(runner, tokenizer, engine_config(policy, workload, throttle), evict)
        self.engine.query(lambda parts: setattr(parts.scheduler, "lets_pass", policy.status_aware))
        if not policy.prefetch:
            self.engine.query(lambda parts: setattr(parts.cache.prefetcher, "window", -1.0))
        self._workload = workload
        self._clients = [
            FlowClient(self.engine, flow, hints, lambda turn, at=at: oracle.started(at, turn))  # type: ignore[misc]
            for at, flow in enumerate(workload.flows)
        ]
        self._turn = 0

    def warm(self) -> None:
        """Call every agent once: its fixed prompt is cached and, with a host tier, backed up."""
        turns = self._next_turns(max(len(flow.fixed) for flow in self._workload.flows))
        with ThreadPoolExecutor(len(self._clients)) as pool:
            list(pool.map(lambda client: [client.call(turn) for turn in turns], self._clients))
        self.engine.wait_idle()

    def prefill_s(self, prompt: Tokens) -> float:
        """Return seconds to compute `prompt` on the otherwise idle engine."""
        once = SamplingParams(max_tokens=1, ignore_eos=True)
        request = GenerateRequest((Segment(prompt, "p0"),), once, ReuseMode.OFF)
        requests = (replace(request, request_id=new_request_id()) for _ in range(CALIBRATIONS))
        return statistics.median(self.engine.submit(one).result().ttft_ms for one in requests) / 1e3

    def trial(self) -> LaneTrial:
        """Run the next calls of all flows at once; the clock starts when every flow has made its lead calls."""
        lead, turns = self._next_turns(self._workload.lead), self._next_turns(self._workload.calls)
        before: dict[str, float] = {}
        began: list[float] = []

        def start() -> None:
            before.update(self._counts())
            began.append(time.perf_counter())

        gate = threading.Barrier(len(self._clients), start, timeout=600)

        def drive(client: FlowClient) -> tuple[tuple[Completion, ...], float]:
            for turn in lead:
                client.call(turn)
            gate.wait()
            return tuple(client.call(turn) for turn in turns), time.perf_counter()

        with ThreadPoolExecutor(len(self._clients)) as pool:
            driven = list(pool.map(drive, self._clients))
        after = self._counts()
        self.engine.wait_idle()
        counts = {name: after[name] - before[name] for name in after}
        return LaneTrial(max(end for _, end in driven) - began[0], tuple(calls for calls, _ in driven), counts)

    def _next_turns(self, size: int) -> range:
        self._turn += size
        return range(self._turn - size, self._turn)

    def _counts(self) -> dict[str, float]:
        stats: Any = self.engine.inspect()
        cache, loading = stats["cache"], stats["loading"]
        return {
            "hit_tokens": cache["hit_tokens"] - cache["host_hit_tokens"],
            "prefetched_hit_tokens": cache["prefetched_hit_tokens"],
            "host_hit_tokens": cache["host_hit_tokens"],
            "computed_tokens": cache["missed_tokens"],
            "bytes_h2d": cache["bytes_loaded"],
            "stall_s": loading["stall_s"],
            "wasted_prefetch": cache["transfers"]["prefetch"]["wasted"],
            "late_prefetch": cache["transfers"]["prefetch"]["late"],
            "cancelled_prefetch": cache["transfers"]["prefetch"]["cancelled"],
        }

    def __exit__(self, *_: object) -> None:
        self.engine.close()


def engine_config(policy: LanePolicy, workload: FlowWorkload, throttle: float) -> EngineSettings:
    """Return settings that differ by policy alone: a prompt is one chunk, the host holds all fixed prompts twice."""
    host = 2 * sum(-(-len(prompt) // BLOCK) for prompt in workload.prompts)
    longest = max(map(len, workload.prompts))
    tiers = ThrottledTiers(
        host_memory=f"{host if policy.host else 0} blocks",
        policy="lru" if policy.evict == "lru" else "sessions",
        throttle=throttle,
    )
    blocks, batch = -(-workload.room // BLOCK), max(2048, 2 * longest)
    discovery = DiscoverySettings(mode=DiscoveryMode.OFF)
    return EngineSettings(
        kv_memory=f"{blocks} blocks", block_size=BLOCK, max_batch_tokens=batch, max_running=64, tiers=tiers,
        discovery=discovery,
    )  # fmt: skip


COMPARED = ("lru_device", "lru_host", "full")
"""Policies that run in a control."""
BASELINES = ("lru_device", "lru_host", "lru_blocking")
"""Policies that the others are compared with."""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class WorkflowSettings:
    """The figure, the model and the number of trials."""

    figure: int = 5
    model_size: str = "32m"
    seeds: int = 10
    """Trials of every policy, each with new dynamic parts."""
    load_ratio: float = 0.43
    """Seconds to load a fixed prompt over seconds to compute it: 0.43 is the paper's A10G, 0.57 its H100."""
    shape: CaseSizes = CaseSizes()
    controls: bool = False
    device: str = "auto"
    seed: int = 0


@dataclass(frozen=True)
class CaseResult:
    """The trials of every policy in one case of a figure."""

    workload: FlowWorkload
    prefill_s: float
    """Seconds to compute the longest fixed prompt."""
    throttle_s: float
    """Least seconds that a block takes from one tier to the other."""
    trials: Mapping[str, Sequence[LaneTrial]]

    @property
    def tokens_identical(self) -> bool:
        """Whether all policies gave the same answers."""
        answers = [[trial.tokens for trial in trials] for trials in self.trials.values()]
        return all(one == answers[0] for one in answers)

    def speedup(self, name: str, baseline: str) -> list[float]:
        """Return the latency of `baseline` over that of `name`, trial by trial."""
        pairs = zip(self.trials[baseline], self.trials[name], strict=True)
        return [theirs.latency_s / ours.latency_s for theirs, ours in pairs]

    def load_ratio(self) -> float | None:
        """Return the measured cost of loading a token over that of computing it.

        Loading is what `lru_host` waited for what it loaded, computing the time to first token of what `lru_device`
        computed. None where several flows overlap, or nothing was loaded.
        """
        computed, loaded = (
            _total(self.trials[name], key)
            for name, key in (("lru_device", "computed_tokens"), ("lru_host", "host_hit_tokens"))
        )
        if len(self.workload.flows) > 1 or not loaded:
            return None
        computing = sum(call.ttft_ms / 1e3 for trial in self.trials["lru_device"] for call in trial.completions)
        return _total(self.trials["lru_host"], "stall_s") / loaded / (computing / computed)

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        measured = self.load_ratio()
        return {
            "case": self.workload.name,
            "room_tokens": self.workload.room,
            "prefill_s": round(self.prefill_s, 4),
            "throttle_s_per_block": round(self.throttle_s, 6),
            "load_ratio_measured": measured and round(measured, 3),
            "policies": {name: summary(trials) for name, trials in self.trials.items()},
            "speedups": self.speedups(),
            "tokens_identical": self.tokens_identical,
        }

    def speedups(self) -> dict[str, dict[str, Any]]:
        """Return median, minimum and maximum over the trials, by baseline and policy."""
        return {
            baseline: {name: spread(self.speedup(name, baseline), 3) for name in self.trials if name != baseline}
            for baseline in BASELINES
            if baseline in self.trials
        }


@dataclass(frozen=True)
class WorkflowResult:
    """All cases, the figure's main case first, and the controls by name."""

    settings: WorkflowSettings
    cases: Sequence[CaseResult]
    controls: Mapping[str, CaseResult] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        first, *others = [case.as_json() for case in self.cases]
        everything = [*self.cases, *self.controls.values()]
        return {
            "figure": self.settings.figure,
            **first,
            "tokens_identical": all(case.tokens_identical for case in everything),
            "other_cases": others,
            "controls": {name: case.as_json() for name, case in self.controls.items()},
        }


def _total(trials: Sequence[LaneTrial], name: str) -> float:
    return sum(trial.counts[name] for trial in trials)


def summary(trials: Sequence[LaneTrial]) -> dict[str, Any]:
    """Return medians over the trials; the percentiles are of single calls, in seconds."""
    latencies = [trial.latency_s for trial in trials]
    calls = [call for trial in trials for call in trial.completions]
    counts = {name: statistics.median(trial.counts[name] for trial in trials) for name in trials[0].counts}
    seconds = [call.total_ms / 1e3 for call in calls]
    return {
        "latency_s": round(statistics.median(latencies), 4),
        **{name: round(value, 4) for name, value in counts.items()},
        "p50": round(statistics.median(seconds), 4),
        "p99": percentile(seconds, 0.99, 4),
        "ttft_p50": round(statistics.median(call.ttft_ms for call in calls) / 1e3, 4),
        "latency_spread": spread(latencies, 4),
        "all_latency_s": [round(value, 4) for value in latencies],
    }


def measure(settings: WorkflowSettings, progress: Progress = lambda _: None) -> WorkflowResult:
    """Measure the cases of a figure and, if `settings.controls`, its controls. Raises `ConfigError` for an unknown
    figure.
    """
    runner, tokenizer = random_runner(settings.model_size, settings.device)
    bench = CaseRunner(settings, runner, tokenizer, progress)
    done = [
        bench.run(workload, {name: POLICIES[name] for name in policies(workload)})
        for workload in cases(settings.figure, settings.shape, runner.vocab_size, settings.seed, tokenizer.encode)
    ]
    found = {}
    chosen = controls(settings.shape, runner.vocab_size, settings.seed) if settings.controls else {}
    for name, control in chosen.items():
        progress(f"control: {name}")
        found[name] = bench.run(control.workload, {one: POLICIES[one] for one in COMPARED}, control.hints)
    return WorkflowResult(settings, done, found)


def policies(workload: FlowWorkload) -> tuple[str, ...]:
    """Return the policies of a figure. In a single flow no request is behind a waiting one, so blocking changes
    nothing.
    """
    return tuple(name for name in POLICIES if name != "lru_blocking" or len(workload.flows) > 1)


@dataclass
class CaseRunner:
    """The model and settings that all cases share."""

    settings: WorkflowSettings
    runner: ModelRunner
    tokenizer: HFTokenizer
    progress: Progress

    def run(
        self,
        workload: FlowWorkload,
        lane_policies: Mapping[str, LanePolicy],
        hints: Callable[[], Hints] = lambda: true_hints,
    ) -> CaseResult:
        """Run all trials of one case; `hints` makes a new filter of forecasts for every lane.

        The first lane, which loads nothing, measures the cost of computing; from it follows how slow the others' copies
        are. All lanes go on with the same prompts.
        """
        longest = max(workload.prompts, key=len)
        lanes: dict[str, Lane] = {}
        throttle = prefill = 0.0
        with ExitStack() as stack:
            for name, policy in lane_policies.items():
                self.progress(f"{workload.name}: warming {name}")
                lane = Lane(policy, workload, self.runner, self.tokenizer, throttle=throttle, hints=hints())
                lanes[name] = stack.enter_context(lane)
                lane.warm()
                if not throttle:
                    prefill = lane.prefill_s(longest)
                    throttle = self.settings.load_ratio * prefill / -(-len(longest) // BLOCK)
            trials: dict[str, list[LaneTrial]] = {name: [] for name in lanes}
            order = list(lanes)
            for seed in range(self.settings.seeds):
                for name in order:
                    self.progress(f"{workload.name}: {name}, trial {seed + 1} of {self.settings.seeds}")
                    trials[name].append(lanes[name].trial())
                order = [*order[1:], order[0]]
        return CaseResult(workload, prefill, throttle, trials)
