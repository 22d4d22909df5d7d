"""One policy's engine with the clients that drive it: every call, every forecast and what they cost."""

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

from kedge.bench.workflow.figures import Flow, Workload
from kedge.cache import EvictionPolicy, NodeView, belady
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.engine.local.engine import LocalEngine
from kedge.engine.local.model.runner import ModelRunner
from kedge.settings import EngineSettings, TierSettings
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
"""What becomes of a forecast on its way to the engine."""


@dataclass(frozen=True)
class Policy:
    """What a lane does with the forecast; without a host tier, what is evicted is computed again."""

    evict: Literal["lru", "steps", "belady"] = "lru"
    host: bool = True
    prefetch: bool = False
    status_aware: bool = True
    """Whether others go before a request that waits for a load."""


POLICIES: Mapping[str, Policy] = {
    "lru_device": Policy(host=False),
    "lru_host": Policy(),
    "lru_blocking": Policy(status_aware=False),
    "evict_only": Policy("steps"),
    "prefetch_only": Policy(prefetch=True),
    "full": Policy("steps", prefetch=True),
    "belady": Policy("belady"),
}
"""All but the first have a host tier, which is reactive where nothing is prefetched: a request waits for its
load, and with `lru_blocking` those behind it do."""


def right(changes: Changes) -> Changes:
    """The forecast as it is."""
    return changes


def silent(changes: Changes) -> Changes:  # noqa: ARG001 (nothing of it arrives)
    """No forecast at all."""
    return {}


class Wrong:
    """A share of what a forecast says is drawn by lot instead."""

    def __init__(self, share: float, agents: int, seed: int) -> None:
        self._share, self._agents, self._rng = share, agents, Random(seed)

    def __call__(self, changes: Changes) -> Changes:
        return {key: self._drawn(next_run) for key, next_run in changes.items()}

    def _drawn(self, next_run: NextRun | None) -> NextRun | None:
        is_wrong = next_run is not None and self._rng.random() < self._share
        return NextRun(float(self._rng.randrange(self._agents))) if is_wrong else next_run


class Oracle:
    """Knows when a node is used next: the turn in which an agent is called whose fixed prompt begins with it.

    With several flows the turns of all of them are taken to be in step.
    """

    def __init__(self, flows: tuple[Flow, ...]) -> None:
        self._flows = flows
        self._fixed = [{agent: array("i", tokens).tobytes() for agent, tokens in flow.fixed.items()} for flow in flows]
        self._turns = [-1] * len(flows)

    def started(self, flow: int, turn: int) -> None:
        """Turn `turn` of a flow is under way: what it uses is next used after it."""
        self._turns[flow] = turn

    def next_use(self, node: NodeView) -> float:
        """The turn in which `node` is used next, `inf` where that is not within `HORIZON` turns."""
        prefix = node.prefix()
        return min((self._next_turn(at, prefix) for at in range(len(self._flows))), default=math.inf)

    def _next_turn(self, at: int, prefix: bytes) -> float:
        users = {agent for agent, fixed in self._fixed[at].items() if fixed.startswith(prefix)}
        if not users:
            return math.inf
        turns = range(self._turns[at] + 1, self._turns[at] + 1 + HORIZON)
        return next((float(turn) for turn in turns if self._flows[at].agent(turn) in users), math.inf)


@dataclass(frozen=True)
class Trial:
    """What all flows did in one trial, and what the cache did meanwhile."""

    latency_s: float
    """From the start of the first call to the end of the last one."""
    calls: tuple[tuple[Completion, ...], ...]
    """By flow."""
    counts: Mapping[str, float]

    @property
    def tokens(self) -> list[Tokens]:
        """All answers."""
        return [call.tokens for calls in self.calls for call in calls]

    @property
    def completions(self) -> list[Completion]:
        return [call for calls in self.calls for call in calls]


class Client:
    """Calls the agents of one flow one after the other, and tells the engine what its run has come to."""

    def __init__(self, engine: LocalEngine, flow: Flow, hints: Hints, on_turn: Callable[[int], None]) -> None:
        self._engine, self._flow, self._hints, self._on_turn = engine, flow, hints, on_turn
        self._progress = RunProgress(flow.graph, flow.run, ForecastBoard())
        self._answer: Tokens = ()
        self._tell(self._progress.begin(0.0))

    def call(self, turn: int) -> Completion:
        """The call of one turn, to its end."""
        request = self._flow.request(turn, self._answer)
        self._on_turn(turn)
        self._tell(self._progress.started(request.agent, float(turn)))
        done = self._engine.submit(request).result()
        self._tell(self._progress.finished(request.agent, float(turn)))
        self._answer = done.tokens
        return done

    def _tell(self, changes: Changes) -> None:
        self._engine.forecast(self._hints(changes))


class Lane(AbstractContextManager["Lane"]):
    """An engine with one policy, and the clients of a workload. Lanes take turns; each goes on where it was."""

    def __init__(
        self,
        policy: Policy,
        workload: Workload,
        runner: ModelRunner,
        tokenizer: HFTokenizer,
        *,
        throttle: float,
        hints: Hints = right,
    ) -> None:
        """`throttle`: seconds that a block takes from one tier to the other."""
        oracle = Oracle(workload.flows)
        evict: EvictionPolicy | None = belady(oracle.next_use) if policy.evict == "belady" else None
        self.engine = LocalEngine.from_runner(runner, tokenizer, engine_config(policy, workload, throttle), evict)
        self._workload = workload
        self._clients = [
            Client(self.engine, flow, hints, lambda turn, at=at: oracle.started(at, turn))  # type: ignore[misc]
            for at, flow in enumerate(workload.flows)
        ]
        self._turn = 0

    def warm(self) -> None:
        """Every agent is called once: its fixed prompt has been seen and, where there is a host tier, backed up."""
        turns = self._next_turns(max(len(flow.fixed) for flow in self._workload.flows))
        with ThreadPoolExecutor(len(self._clients)) as pool:
            list(pool.map(lambda client: [client.call(turn) for turn in turns], self._clients))
        self.engine.wait_idle()

    def prefill_s(self, prompt: Tokens) -> float:
        """Seconds to compute `prompt` while the engine has nothing else to do."""
        once = SamplingParams(max_tokens=1, ignore_eos=True)
        request = GenerateRequest((Segment(prompt, "p0"),), once, ReuseMode.OFF)
        asked = (replace(request, request_id=new_request_id()) for _ in range(CALIBRATIONS))
        return statistics.median(self.engine.submit(one).result().ttft_ms for one in asked) / 1e3

    def trial(self) -> Trial:
        """The next calls of all flows, at once; the clock starts when every flow has its lead behind it."""
        lead, turns = self._next_turns(self._workload.lead), self._next_turns(self._workload.calls)
        before: dict[str, float] = {}
        began: list[float] = []

        def start() -> None:
            before.update(self._counts())
            began.append(time.perf_counter())

        gate = threading.Barrier(len(self._clients), start, timeout=600)

        def drive(client: Client) -> tuple[tuple[Completion, ...], float]:
            for turn in lead:
                client.call(turn)
            gate.wait()
            return tuple(client.call(turn) for turn in turns), time.perf_counter()

        with ThreadPoolExecutor(len(self._clients)) as pool:
            driven = list(pool.map(drive, self._clients))
        after = self._counts()
        self.engine.wait_idle()
        counts = {name: after[name] - before[name] for name in after}
        return Trial(max(end for _, end in driven) - began[0], tuple(calls for calls, _ in driven), counts)

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


def engine_config(policy: Policy, workload: Workload, throttle: float) -> EngineSettings:
    """The same engine for all policies: a prompt is one chunk, and the host has room for twice what is fixed."""
    host = 2 * sum(-(-len(prompt) // BLOCK) for prompt in workload.prompts)
    longest = max(map(len, workload.prompts))
    tiers = TierSettings(
        host_blocks=host if policy.host else 0,
        policy="lru" if policy.evict == "lru" else "steps",
        prefetch_window=2.0 if policy.prefetch else -1.0,
        status_aware=policy.status_aware,
        throttle=throttle,
    )
    blocks, batch = -(-workload.room // BLOCK), max(2048, 2 * longest)
    return EngineSettings(num_blocks=blocks, block_size=BLOCK, max_batch_tokens=batch, max_running=64, tiers=tiers)
