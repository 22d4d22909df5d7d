"""One policy's engine with the clients that drive it."""

from __future__ import annotations

import math
import statistics
import threading
import time
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

from kedge.bench.flows import Flow, FlowWorkload
from kedge.cache import EvictionPolicy, NodeView, belady
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.engine.local.engine import LocalEngine
from kedge.engine.local.model.runner import ModelRunner
from kedge.settings import DiscoveryMode, DiscoverySettings, EngineSettings, TierSettings
from kedge.types import Completion, GenerateRequest, ReuseMode, SamplingParams, Segment, Tokens, new_request_id
from kedge.workflow.forecast import Changes, ForecastBoard, RunProgress
from kedge.workflow.steps import NextRun

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
    plain: bool = False
    """Whether clients say nothing, and the engine finds out who calls and who is next."""


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

    def next_use(self, node: NodeView) -> float:
        """Return the turn in which `node` is used next, `inf` beyond `HORIZON` turns."""
        prefix = node.prefix()
        return min((self._next_turn(at, prefix) for at in range(len(self._flows))), default=math.inf)

    def _next_turn(self, at: int, prefix: bytes) -> float:
        users = {agent for agent, fixed in self._fixed[at].items() if fixed.startswith(prefix)}
        if not users:
            return math.inf
        turns = range(self._turns[at] + 1, self._turns[at] + 1 + HORIZON)
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
        done = self._engine.submit(self._request(turn)).result()
        self._send(self._progress.finished(agent, float(turn)))
        self._answer = done.tokens
        return done

    def _request(self, turn: int) -> GenerateRequest:
        return self._flow.request(turn, self._answer)

    def _send(self, changes: Changes) -> None:
        self._engine.forecast(self._hints(changes))


class PlainFlowClient(FlowClient):
    """A client that says nothing of what it does."""

    def _request(self, turn: int) -> GenerateRequest:
        asked = super()._request(turn)
        return GenerateRequest((Segment(asked.tokens, "p0"),), asked.sampling, asked.reuse, is_plain=True)

    def _send(self, changes: Changes) -> None:
        """Keep the forecast."""


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
        evict: EvictionPolicy | None = belady(oracle.next_use) if policy.evict == "belady" else None
        self.engine = LocalEngine.from_runner(runner, tokenizer, engine_config(policy, workload, throttle), evict)
        self._workload = workload
        client = PlainFlowClient if policy.plain else FlowClient
        self._clients = [
            client(self.engine, flow, hints, lambda turn, at=at: oracle.started(at, turn))  # type: ignore[misc]
            for at, flow in enumerate(workload.flows)
        ]
        self._turn = 0

    def warm(self, rounds: int = 1, *, skipped: int = 0) -> None:
        """Call every agent so many times: its fixed prompt is cached and, with a host tier, backed up.

        The prompts are those that come after `skipped` rounds.
        """
        agents = max(len(flow.fixed) for flow in self._workload.flows)
        turns = self._next_turns((skipped + rounds) * agents)[skipped * agents :]
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
    tiers = TierSettings(
        host_blocks=host if policy.host else 0,
        policy="lru" if policy.evict == "lru" else "sessions",
        prefetch_window=2.0 if policy.prefetch else -1.0,
        status_aware=policy.status_aware,
        throttle=throttle,
    )
    blocks, batch = -(-workload.room // BLOCK), max(2048, 2 * longest)
    discovery = DiscoverySettings(mode=DiscoveryMode.EXACT if policy.plain else DiscoveryMode.OFF)
    return EngineSettings(
        num_blocks=blocks, block_size=BLOCK, max_batch_tokens=batch, max_running=64, tiers=tiers, discovery=discovery
    )
