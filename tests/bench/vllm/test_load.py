"""`kedge bench vllm --case load`: its teams and engines, what is measured, and a small run on real vLLM."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kedge.bench import vllm as bench
from kedge.bench.load import AGENTS, USUAL, LoadTeam, TeamSizes, random_flow, random_team, reading_team
from kedge.bench.shapes import SHAPES
from kedge.bench.vllm import KEDGE, LOAD_ROOM, STOCK, VllmBenchSettings, engine_settings, measure_load
from kedge.cli.main import app
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.engine.echo import EchoEngine
from kedge.integrations.vllm.engine.options import refuse_foreign
from kedge.runner.prompts import compiled
from kedge.types import GenerateRequest, ReuseMode

TINY = VllmBenchSettings(model_size="tiny", clients=(1, 2), seconds=0.2, trials=2)


def test_a_random_teams_texts_are_tokens_of_its_folders_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    model, team = bench.served_team(TINY, tmp_path)
    tokenizer = HFTokenizer.load(tmp_path)
    (question,) = islice(team.questions("a"), 1)
    assert len(tokenizer.encode(question)) == USUAL.question
    vocab = SHAPES["tiny"]["vocab_size"]
    assert team.flow == random_flow(vocab, USUAL.answer) and model == tmp_path
    longest = max(sum(map(len, prompt.prefixes)) for prompt in compiled(team.flow, tokenizer).values())
    assert longest + USUAL.question + AGENTS * (USUAL.answer + 1) < LOAD_ROOM.longest
    assert all(max(prompt.prefixes[0]) < vocab for prompt in compiled(team.flow, tokenizer).values())


@pytest.mark.parametrize("team", [reading_team(0), random_team(100, USUAL, 0)])
def test_both_engines_have_settings_that_the_plug_in_takes(team: LoadTeam) -> None:
    settings = engine_settings(Path("model"), team)
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

    def inspect(self) -> dict[str, Any]:
        return {"requests": {"running": 1}}

    def submit(self, request: GenerateRequest) -> Any:
        self.asked.append(request)
        return super().submit(request)


def test_every_combination_has_an_engine_of_its_own_that_one_team_has_warmed_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(FakeEngine, "made", [])
    monkeypatch.setattr(bench, "VLLMEngine", FakeEngine)
    notes = list[str]()
    found = measure_load(TINY, tmp_path, notes.append)
    assert {name: {count: list(engines) for count, engines in counts.items()} for name, counts in found.items()} == {
        "tiny": {"1": [STOCK, KEDGE], "2": [STOCK, KEDGE]}
    }
    turns = [(1, STOCK), (1, KEDGE), (2, KEDGE), (2, STOCK)]
    assert notes == [f"load: {count} at once, {name}, trial {trial} of 2" for count in (1, 2) for trial, name in turns]
    assert [engine.plugged for engine in FakeEngine.made] == [False, True, True, False] * 2
    for engine in FakeEngine.made:
        team = AGENTS
        modes = [request.reuse for request in engine.asked]
        assert modes[:team] == [ReuseMode.OFF] * team
        assert set(modes[team:]) == {ReuseMode.TRANSLATE if engine.plugged else ReuseMode.EXACT}
        with pytest.raises(Exception, match="closed"):
            engine.submit(engine.asked[0])
    for engines in found["tiny"].values():
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


@pytest.mark.slow
def test_a_small_run_on_real_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    file = tmp_path / "vllm.json"
    monkeypatch.setattr(bench, "USUAL", TeamSizes(question=60, answer=7))
    done = CliRunner().invoke(app, ["bench", "vllm", "--quick", "--case", "load", "--json", str(file)])
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())["load"]
    assert found.keys() == {"32m"} and found["32m"].keys() == {"2"}
    stock, ours = found["32m"]["2"][STOCK], found["32m"]["2"][KEDGE]
    for row in (stock, ours):
        assert row["calls"] > 0 and row["errors"] == 0
        assert row["ttft_p50_ms"] > 0 and row["exact_share"] > 0
    assert stock["translated_share"] == 0
