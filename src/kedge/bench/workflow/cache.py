"""The cost of the cache's own operations without a model, and its growth with the number of blocks and agents."""

from __future__ import annotations

import gc
import math
import random
import statistics
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter
from typing import Any

from kedge.bench.workflow.figures import cycle
from kedge.cache import CacheManager, Changes, Copied, Copy, steps_to_execution
from kedge.settings import TierSettings
from kedge.types import AgentId, Namespace, RequestId, RunId, TenantId
from kedge.workflow import AgentKey, ForecastBoard, RunKey, RunProgress

BLOCK, PROMPT = 16, 1024
"""Tokens of a block, and of the prompts that fill the cache: half of each is the fixed part of an agent's prompt."""
RING = 10
"""Agents of a run."""
LONG = 4096
"""Tokens of the prompt that is looked up and inserted."""
SPACE = Namespace(TenantId("tenant"))


@dataclass(frozen=True)
class CacheSettings:
    """The sizes to measure and the number of repeats."""

    blocks: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    agents: tuple[int, ...] = (10, 100, 1_000, 10_000)
    repeats: int = 50
    seed: int = 0


QUICK = CacheSettings(blocks=(1_000, 10_000), agents=(10, 100, 1_000), repeats=20)


@dataclass(frozen=True)
class OperationTimes:
    """Median microseconds of each operation at one size."""

    size: int
    micros: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        return {"size": self.size, **{name: round(time, 3) for name, time in self.micros.items()}}


@dataclass(frozen=True)
class CacheResult:
    """Times by number of blocks and by number of agents."""

    blocks: list[OperationTimes]
    agents: list[OperationTimes]

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        sizes = {"blocks": self.blocks, "agents": self.agents}
        return {
            **{name: [one.as_json() for one in times] for name, times in sizes.items()},
            "growth": {name: growth(times) for name, times in sizes.items()},
        }


class NoCopier:
    """A copier whose copies end at once without copying."""

    def __init__(self) -> None:
        self._ended: list[Copied] = []

    def submit(self, copy: Copy) -> None:
        self._ended.append(Copied(copy.copy_id, ok=True))

    def hurry(self, copy_id: int) -> None:
        """Do nothing: the copy has ended already."""

    def drain(self) -> list[Copied]:
        ended, self._ended = self._ended, []
        return ended


class FilledCache:
    """A cache with requests that never ran: its blocks are numbers without KV."""

    def __init__(self, num_blocks: int, seed: int, host_blocks: int = 0) -> None:
        tiers = TierSettings(host_blocks=host_blocks)
        self.cache = CacheManager(num_blocks, BLOCK, steps_to_execution(), tiers, NoCopier())
        self._rng = random.Random(seed)
        self._ids = count()

    def request_id(self) -> RequestId:
        """Return a new request id."""
        return RequestId(str(next(self._ids)))

    def tokens(self, size: int) -> list[int]:
        """Return random token ids."""
        return array("i", self._rng.randbytes(4 * size)).tolist()

    def serve(self, tokens: Sequence[int]) -> None:
        """Admit and finish a request."""
        request = self.request_id()
        self.cache.admit(request, SPACE, tokens, len(tokens), len(tokens))
        self.cache.finish(request, tokens)

    def fill(self, agents: int) -> None:
        """Fill the cache with prompts of `agents` agents, each with a fixed part of its own."""
        self.cache.on_forecast({agent: (float(agent % 10), 1.0) for agent in range(agents)})
        fixed = [self.tokens(PROMPT // 2) for _ in range(agents)]
        for prompt in range(self.cache.num_blocks // (PROMPT // BLOCK)):
            agent = prompt % agents
            self.serve(fixed[agent] + self.tokens(PROMPT // 2))
            if prompt < agents:
                self.cache.on_label(SPACE, agent, fixed[agent])
        self.take_the_rest()

    def take_the_rest(self) -> None:
        """Fill the blocks that are still free."""
        if free := self.cache.stats().free_blocks:
            self.serve(self.tokens(free * BLOCK))


def measure(settings: CacheSettings, progress: Callable[[str], None] = lambda _: None) -> CacheResult:
    """Measure all operations at all sizes."""
    blocks, agents = [], []
    for size in settings.blocks:
        progress(f"{size:,} blocks")
        blocks.append(_at_blocks(size, settings))
    for size in settings.agents:
        progress(f"{size:,} agents")
        agents.append(_at_agents(size, settings))
    return CacheResult(blocks, agents)


def growth(times: Sequence[OperationTimes]) -> dict[str, dict[str, float]]:
    """Return the growth of each operation from the smallest to the largest size.

    `exponent`: p of the fit time ~ size^p (0 is flat, 1 is linear). `to_log`: time over that of logarithmic growth from
    the smallest size on; up to 1 is no worse than logarithmic.
    """
    return {name: _growth([(one.size, one.micros[name]) for one in times]) for name in times[0].micros}


def _growth(points: Sequence[tuple[int, float]]) -> dict[str, float]:
    if len(points) < 2:
        return {}
    (least, first), *_, (most, last) = points
    slope = statistics.linear_regression(*zip(*((math.log(n), math.log(t)) for n, t in points), strict=True)).slope
    return {"exponent": round(slope, 3), "to_log": round(last / first / (math.log(most) / math.log(least)), 3)}


def _at_blocks(num_blocks: int, settings: CacheSettings) -> OperationTimes:
    filled = FilledCache(num_blocks, settings.seed)
    filled.fill(agents=min(1_000, num_blocks // 128))
    cache, repeats = filled.cache, settings.repeats
    known = filled.tokens(LONG)
    filled.serve(known)
    found = statistics.median(_time(cache.match, SPACE, known) for _ in range(repeats))
    assert cache.match(SPACE, known).tokens_count == LONG
    micros = {
        "match": found,
        "evict a run, per block": _evict_runs(filled, repeats),
        "insert": _insert(filled, repeats),
    }
    return OperationTimes(num_blocks, {**micros, "evict, per block": _evict_one_by_one(filled, repeats)})


def _insert(filled: FilledCache, repeats: int) -> float:
    """Measure the insertion of a lease of 4,096 unknown tokens."""
    times = []
    for _ in range(repeats):
        tokens, request = filled.tokens(LONG), filled.request_id()
        filled.cache.admit(request, SPACE, tokens, 0, LONG)
        times.append(_time(filled.cache.finish, request, tokens))
    return statistics.median(times)


def _evict_runs(filled: FilledCache, repeats: int) -> float:
    """Measure evicting room for 4,096 tokens at a time, per evicted block."""
    times = []
    for _ in range(repeats):
        tokens, request = filled.tokens(LONG), filled.request_id()
        before = filled.cache.stats().evictions
        spent = _time(filled.cache.admit, request, SPACE, tokens, 0, LONG)
        times.append(spent / (filled.cache.stats().evictions - before))
        filled.cache.finish(request, tokens)
    return statistics.median(times)


def _evict_one_by_one(filled: FilledCache, repeats: int) -> float:
    """Measure growing a request by one block at a time, each of which has to be evicted."""
    request = filled.request_id()
    filled.cache.admit(request, SPACE, [], 0, 0)
    steps = min(20 * repeats, filled.cache.num_blocks // 2)
    evicted = filled.cache.stats().evictions
    times = [_time(filled.cache.extend, request, n * BLOCK) for n in range(1, steps + 1)]
    assert filled.cache.stats().evictions == evicted + steps
    filled.cache.abort(request)
    return statistics.median(times)


def _at_agents(agents: int, settings: CacheSettings) -> OperationTimes:
    """Measure updates of the forecast.

    Every agent has its own block behind one that all share. There is room for every fifth on the device, though three
    of ten are near, so the prefetch plan has many candidates that find no room.
    """
    filled = FilledCache(agents // 5 + 2, settings.seed, host_blocks=agents + 1)
    cache, system = filled.cache, filled.tokens(BLOCK)
    cache.on_forecast({agent: (float(agent % 10), 1.0) for agent in range(agents)})
    prompts = [system + filled.tokens(BLOCK) for _ in range(agents)]
    for agent, fixed in enumerate(prompts):
        filled.serve(fixed)
        cache.on_label(SPACE, agent, fixed)
        cache.pump()
    rng = random.Random(settings.seed)
    changes = [{rng.randrange(agents): (float(rng.randrange(10)), 1.0)} for _ in range(20 * settings.repeats)]
    update = statistics.median(_time(cache.on_forecast, change) for change in changes)
    planned = statistics.median(_time(_update_and_plan, cache, change) for change in changes)
    ended = _end_agents(cache, prompts, settings)
    return OperationTimes(
        agents, {"forecast of one agent": update, "the same, and a plan": planned, "an agent ends": ended}
    )


def _update_and_plan(cache: CacheManager, change: Changes) -> None:
    cache.on_forecast(change)
    cache.pump()


def _end_agents(cache: CacheManager, prompts: Sequence[Sequence[int]], settings: CacheSettings) -> float:
    """Measure the end of an agent in one of many runs of ten: its run's steps are computed, published, applied and
    planned for.
    """
    board, rng = ForecastBoard(), random.Random(settings.seed)
    keys = [RunKey(SPACE, "client", RunId(str(i))) for i in range(len(prompts) // RING)]
    runs = [RunProgress(cycle(RING), key, board) for key in keys]
    for at, run in enumerate(runs):
        cache.on_forecast({**run.begin(0.0), **run.started(AgentId(f"a{at % RING}"), 0.0)})
        for one, fixed in enumerate(prompts[at * RING : (at + 1) * RING]):
            cache.on_label(SPACE, AgentKey(*run.run, AgentId(f"a{one}")), fixed)

    def end(run: RunProgress, agent: AgentId) -> None:
        _update_and_plan(cache, run.finished(agent, 0.0))

    ends = [(rng.choice(runs), AgentId(f"a{rng.randrange(RING)}")) for _ in range(20 * settings.repeats)]
    return statistics.median(_time(end, *one) for one in ends)


def _time(call: Callable[..., object], *arguments: object) -> float:
    """Return the microseconds of one call, without the garbage collector."""
    gc.disable()
    began = perf_counter()
    call(*arguments)
    spent = perf_counter() - began
    gc.enable()
    return spent * 1e6
