"""The cache's policy in virtual time: computing and copying take what they are said to, whatever the machine does.

What `kedge bench workflow` measures with a model, without its noise: the gain of figure 5, and that no control is
slower than LRU. A call that finds its fixed prompt costs 0.4 of computing that prompt, a load 0.43.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import pytest

from benchmarks.workflow.measure import BLOCK, POLICIES, CaseSizes, Control, Hints, controls, true_hints
from kedge.bench.flows import FlowWorkload, Sizes, single_flow
from kedge.cache import CacheManager, Copied, Copy, Direction, Readiness, lru
from kedge.engine.local.sessions import SessionCaching
from kedge.errors import OutOfBlocks
from kedge.policies.eviction import steps_to_execution
from kedge.policies.sessions import TurnEnd
from kedge.settings import TierSettings
from kedge.types import GenerateRequest, Namespace, RequestId, TenantId
from kedge.workflow.forecast import ForecastBoard, RunProgress

SIZES, VOCAB, NAMESPACE = Sizes(512, 32, 8), 1000, Namespace(TenantId("default"))
PREFILL, CALL, LOAD = 1.0, 0.4, 0.43
DECODES = 8
WARM, TIMED = 20, 60
"""Calls before the clock starts, and after."""
CONTROLS = controls(CaseSizes(sizes=Sizes(2 * SIZES.fixed, SIZES.dynamic, SIZES.output)), VOCAB, 0)


@dataclass
class _Moving:
    copy: Copy
    urgent: bool = False
    spent: float = 0.0

    @property
    def rank(self) -> tuple[bool, bool, int]:
        return not self.urgent, self.copy.direction is Direction.OFFLOAD, self.copy.copy_id


@dataclass
class VirtualCopier:
    """One copy at a time, the most urgent first; a block takes `per_block`."""

    per_block: float
    now: float = 0.0
    moving: list[_Moving] = field(default_factory=list)
    ended: list[Copied] = field(default_factory=list)

    def submit(self, copy: Copy) -> None:
        self.moving.append(_Moving(copy))

    def hurry(self, copy_id: int) -> None:
        for one in self.moving:
            one.urgent |= one.copy.copy_id == copy_id

    def drain(self) -> list[Copied]:
        ended, self.ended = self.ended, []
        return ended

    def next_end(self) -> float:
        """When what is being copied will have been."""
        first = min(self.moving, key=lambda one: one.rank)
        return self.now + self.per_block * len(first.copy.sources) - first.spent

    def advance(self, to: float) -> None:
        while self.moving and (end := self.next_end()) <= to:
            first = min(self.moving, key=lambda one: one.rank)
            self.moving.remove(first)
            self.ended.append(Copied(first.copy.copy_id, ok=True, seconds=first.spent + end - self.now))
            self.now = end
        if self.moving:
            min(self.moving, key=lambda one: one.rank).spent += to - self.now
        self.now = to


class VirtualEngine:
    """One call at a time on a cache with one policy, as the embedded engine does it."""

    def __init__(self, name: str, workload: FlowWorkload, hints: Hints) -> None:
        policy, self.flow, self.hints, self.now = POLICIES[name], workload.flows[0], hints, 0.0
        self.copier = VirtualCopier(LOAD * PREFILL * BLOCK / SIZES.fixed)
        tiers = TierSettings(host_memory="1000 blocks" if policy.host else 0)
        is_kedge = policy.evict == "sessions"
        evict = steps_to_execution(tiers.unlabelled_step) if is_kedge else lru
        self.cache = CacheManager(workload.room // BLOCK, BLOCK, evict, tiers, self.copier)
        if not policy.prefetch:
            self.cache.prefetcher.window = -1
        self.sessions = SessionCaching(self.cache, is_kedge, lambda: self.now)
        self.cache.observe_compute(SIZES.fixed, PREFILL)
        self.progress = RunProgress(self.flow.graph, self.flow.run, ForecastBoard())
        self.sessions.on_forecast(hints(self.progress.begin(0.0)))

    def run(self) -> float:
        """Seconds of the timed calls."""
        for turn in range(WARM):
            self.call(turn)
        began = self.now
        for turn in range(WARM, WARM + TIMED):
            self.call(turn)
        self.cache.check_integrity()
        return self.now - began

    def call(self, turn: int) -> None:
        request = self.flow.request(turn)
        self.sessions.on_forecast(self.hints(self.progress.started(request.agent, float(turn))))
        began = self.sessions.arrived(request)
        missing = self.admit(request)
        self.work(PREFILL * missing / SIZES.fixed + CALL / 4)
        self.cache.commit_prefix(request.request_id, request.tokens)
        key = request.agent_key
        self.cache.on_label(NAMESPACE, key, request.tokens[: SIZES.fixed])
        for _ in range(DECODES):
            self.work(0.75 * CALL / DECODES)
        self.cache.finish(request.request_id, request.tokens)
        if began:
            self.sessions.answered(began, request.tokens, TurnEnd())
        self.sessions.on_forecast(self.hints(self.progress.finished(request.agent, float(turn))))

    def admit(self, request: GenerateRequest) -> int:
        """Waits until the request can be admitted; how much of its fixed prompt has to be computed."""
        key, tokens = request.request_id, request.tokens
        self.work(0)
        while self.cache.demand(key, NAMESPACE, tokens[:-1]) is not Readiness.READY:
            self.wait()
        while (exact := self.try_admit(key, tokens)) is None:
            self.wait()
        return SIZES.fixed - exact

    def try_admit(self, key: RequestId, tokens: tuple[int, ...]) -> int | None:
        total = len(tokens) + SIZES.output
        try:
            return self.cache.admit(key, NAMESPACE, tokens, len(tokens) - 1, total).exact_tokens
        except OutOfBlocks:
            return None

    def wait(self) -> None:
        self.until(self.copier.next_end())

    def work(self, seconds: float) -> None:
        self.until(self.now + seconds)

    def until(self, moment: float) -> None:
        self.now = moment
        self.copier.advance(moment)
        self.cache.pump()


@cache
def seconds(name: str) -> Mapping[str, float]:
    """By policy; `name` is a control or `room …`."""
    control = CONTROLS.get(name) or Control(single_flow(SIZES, VOCAB, 0, room=int(name[-1])), lambda: true_hints)
    return {
        policy: VirtualEngine(policy, control.workload, control.hints()).run()
        for policy in ("lru_device", "lru_host", "full")
    }


@pytest.mark.parametrize("room", [3, 4, 5])
def test_a_cycle_gains_what_the_paper_reports(room: int) -> None:
    found = seconds(f"room {room}")
    assert found["lru_device"] == pytest.approx(TIMED * (PREFILL + CALL))
    assert found["lru_host"] == pytest.approx(TIMED * (LOAD + CALL))
    assert found["lru_device"] / found["full"] >= 2.9
    assert found["lru_host"] / found["full"] >= 1.8


@pytest.mark.parametrize("name", CONTROLS)
def test_no_control_is_slower_than_lru(name: str) -> None:
    found = seconds(name)
    assert found["lru_device"] / found["full"] >= 0.98
    assert found["lru_host"] / found["full"] >= 0.98


def test_where_nothing_can_be_gained_nothing_changes() -> None:
    for name in ("no pressure", "no hints"):
        assert seconds(name)["full"] == pytest.approx(seconds(name)["lru_host"])
    assert seconds("no pressure")["full"] == pytest.approx(TIMED * CALL)
