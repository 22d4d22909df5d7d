"""`kedge bench workflow`: the same tokens under every policy, hits as theory has them, and what it writes."""

import math
from array import array
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from benchmarks.workflow.measure import (
    BLOCK,
    POLICIES,
    CaseSizes,
    Control,
    Hints,
    Lane,
    Oracle,
    WorkflowSettings,
    WrongHints,
    controls,
    measure,
    true_hints,
)
from kedge.bench.flows import FlowWorkload, Sizes, single_flow
from kedge.bench.shapes import random_runner
from kedge.cache import CacheManager, Direction, Readiness
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.engine.local.model.runner import ModelRunner
from kedge.engine.local.sessions import SessionCaching
from kedge.errors import OutOfBlocks
from kedge.policies.eviction import lru, steps_to_execution
from kedge.policies.sessions import TurnEnd
from kedge.settings import TierSettings
from kedge.types import AgentKey, GenerateRequest, Namespace
from kedge.workflow.forecast import ForecastBoard, RunProgress
from kedge.workflow.steps import NextRun
from tests.cache.helpers import FakeCopier
from tests.cli.commands import measured

SMALL = Sizes(64, 16, 3)
TINY = CaseSizes(sizes=SMALL, rooms=(4,), flows=((48, 3),), new=16, reply=16, room=10 * 80, answer=3, questions=1)
KEYS = {"latency_s", "hit_tokens", "bytes_h2d", "stall_s", "wasted_prefetch", "p50", "p99"}
VOCAB = 1000


@cache
def tiny() -> tuple[ModelRunner, HFTokenizer]:
    return random_runner("tiny", "cpu")


@pytest.mark.parametrize("figure", [5, 6, 8])
def test_every_policy_gives_the_same_tokens_and_the_promised_figures(figure: int) -> None:
    result = measure(WorkflowSettings(figure, "tiny", seeds=2, load_ratio=0.1, shape=TINY)).as_json()
    assert result["tokens_identical"] is True
    assert result["figure"] == figure
    blocking = ["lru_blocking"] if figure != 5 else []
    policies = ["lru_device", "lru_host", *blocking, "evict_only", "prefetch_only", "full", "belady"]
    assert list(result["policies"]) == policies
    assert list(result["speedups"]) == ["lru_device", "lru_host", *blocking]
    for row in result["policies"].values():
        assert set(row) >= KEYS
        assert row["latency_s"] > 0
        assert row["latency_spread"]["min"] <= row["latency_s"] <= row["latency_spread"]["max"]
        assert 0 < row["p50"] <= row["p99"]
    assert result["policies"]["lru_device"]["bytes_h2d"] == 0


@pytest.mark.parametrize("room", [3, 4, 5])
def test_steps_keep_as_many_as_theory_has_it_and_as_the_oracle_does(room: int) -> None:
    """Of N agents in a cycle with room for C, LRU hits none and steps-to-execution (C-1)/(N-1) of the tokens."""
    sizes = Sizes(160, 8, 2)
    workload = replace(single_flow(sizes, VOCAB, 0, room=room), calls=9, lead=0)  # after 9 calls it all repeats
    found = dict[str, list[float]]()
    for name in ("lru_device", "lru_host", "evict_only", "belady"):
        with Lane(POLICIES[name], workload, *tiny(), throttle=0.0) as lane:
            lane.warm()
            found[name] = [lane.trial().counts["hit_tokens"] for _ in range(2)]
    assert found["lru_device"] == found["lru_host"] == [0, 0]
    kept, best = sum(found["evict_only"]), sum(found["belady"])
    assert kept == pytest.approx(2 * 9 * sizes.fixed * (room - 1) / 9, rel=0.1)
    assert kept == pytest.approx(best, rel=0.05)


# hints and the oracle -------------------------------------------------------------------------------------------


def test_as_many_hints_are_wrong_as_was_asked_for() -> None:
    flow = single_flow(SMALL, VOCAB, 0).flows[0]
    changes = {AgentKey(*flow.run, str(i)): NextRun(100.0) for i in range(2000)}
    for share in (0.0, 0.3, 1.0):
        told = WrongHints(share, 10, 0)(changes)
        wrong = sum(next_run != NextRun(100.0) for next_run in told.values())
        assert wrong == pytest.approx(2000 * share, abs=80 if 0 < share < 1 else 0)
    assert WrongHints(1.0, 10, 0)(dict.fromkeys(changes)) == dict.fromkeys(changes)


def test_the_oracle_looks_forward_from_the_turn_that_runs() -> None:
    workload = single_flow(SMALL, VOCAB, 0)
    flow, oracle = workload.flows[0], Oracle(workload.flows)

    def next_use(tokens: tuple[int, ...]) -> float:
        return oracle.next_use(SimpleNamespace(prefix=lambda: array("i", tokens).tobytes()))  # type: ignore[arg-type]

    fixed = [flow.fixed[f"a{i}"] for i in range(10)]
    assert [next_use(fixed[i]) for i in (0, 3, 9)] == [0, 3, 9]
    oracle.started(0, 3)
    assert [next_use(fixed[i][:16]) for i in (0, 3, 9)] == [10, 13, 9]
    assert next_use((*fixed[0], 5)) == math.inf
    assert next_use(tuple(Random(0).choices(range(VOCAB), k=16))) == math.inf


# the command ----------------------------------------------------------------------------------------------------


def test_the_command_writes_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "benchmarks.workflow.measure.controls", lambda *given: {"no hints": controls(*given)["no hints"]}
    )
    flags = ["--quick", "--model-size", "tiny", "--seeds", "1", "--fixed", "64", "--output", "2", "--load-ratio", "0.1"]
    data, shown = measured(tmp_path, "bench", "workflow", *flags, "--room", "3", "--controls")
    assert {"machine", "figure", "settings", "policies", "tokens_identical", "controls"} <= set(data)
    assert data["settings"]["shape"]["sizes"] == {"fixed": 64, "dynamic": 32, "output": 2}
    assert data["case"] == "64/32/2, room for 3 of 10"
    assert list(data["controls"]["no hints"]["policies"]) == ["lru_device", "lru_host", "full"]
    assert "prefetch_only" in shown


# in virtual time ------------------------------------------------------------------------------------------------
# Computing and copying take what they are said to, whatever the machine does: the gain of figure 5, and that no control
# is slower than LRU. A call that finds its fixed prompt costs 0.4 of computing that prompt, a load 0.43.

SIZES, NAMESPACE = Sizes(512, 32, 8), Namespace("default")
PREFILL, CALL, LOAD = 1.0, 0.4, 0.43
DECODES = 8
WARM, TIMED = 20, 60
"""Calls before the clock starts, and after."""
CONTROLS = controls(CaseSizes(sizes=Sizes(2 * SIZES.fixed, SIZES.dynamic, SIZES.output)), VOCAB, 0)


class VirtualCopier(FakeCopier):
    """Ends one copy at a time, the most urgent first, as time passes; a block takes `per_block`."""

    def __init__(self, per_block: float) -> None:
        super().__init__()
        self.per_block, self.now, self.spent = per_block, 0.0, Counter[int]()

    def next_end(self) -> float:
        """When what is being copied will have been."""
        self.submitted.sort(
            key=lambda one: (one.copy_id not in self.hurried, one.direction is Direction.OFFLOAD, one.copy_id)
        )
        return self.now + self.per_block * len(self.submitted[0].sources) - self.spent[self.submitted[0].copy_id]

    def advance(self, to: float) -> None:
        while self.submitted and (end := self.next_end()) <= to:
            self.end(seconds=self.spent[self.submitted[0].copy_id] + end - self.now)
            self.now = end
        if self.submitted:
            self.spent[self.submitted[0].copy_id] += to - self.now
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
        self.cache.tiers.transfers.cost.computed(SIZES.fixed, PREFILL)
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
            self.until(self.copier.next_end())
        while True:
            with suppress(OutOfBlocks):
                lease = self.cache.admit(key, NAMESPACE, tokens, len(tokens) - 1, len(tokens) + SIZES.output)
                return SIZES.fixed - lease.exact_tokens
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
