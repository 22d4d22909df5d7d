"""`kedge bench vllm --case team`: what an agent gains, and a small run on real vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.vllm.team import DENSE, TeamSettings, agent_figures
from kedge.bench.vllm import KEDGE, STOCK, VllmCall, VllmTrial
from kedge.cli.main import app
from tests.bench.vllm.test_measure import call


def test_gains_of_an_agent_are_over_dense_and_over_stock() -> None:
    def trial(ttft_s: float, translated: int | None = None) -> VllmTrial:
        receipt = None if translated is None else {"tokens": {"translated": translated}}
        one = VllmCall((7,) * 900, (1, 2), 0, ttft_s, 2 * ttft_s, receipt)
        return VllmTrial(1.0, (call(100, 0, 9.0), one))

    kedge = [trial(0.1, 850), trial(0.2, 800), trial(0.1, 899)]
    rounds = [
        {DENSE: trial(dense), STOCK: trial(1.0), KEDGE: ours}
        for dense, ours in zip((1.0, 3.0, 2.0), kedge, strict=True)
    ]
    said = agent_figures(1, rounds)
    assert (said["agent"], said["prompt_tokens"], said["translated_tokens"]) == (1, 900, 800)
    assert said["all_dense_ms"] == [1000.0, 3000.0, 2000.0]
    assert (said["dense_ms"], said["stock_ms"], said["kedge_ms"]) == (2000.0, 1000.0, 100.0)
    assert (said["speedup_over_dense"], said["speedup_over_stock"]) == (20.0, 10.0)


@pytest.mark.slow
def test_a_small_run_on_real_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    small = TeamSettings(question=96, prefix=64, output=32, agents=3, samples=4, repeats=1)
    monkeypatch.setattr("benchmarks.vllm.team.QUICK_TEAM", small)
    file = tmp_path / "vllm.json"
    done = CliRunner().invoke(app, ["bench", "vllm", "--quick", "--case", "team", "--json", str(file)])
    assert done.exit_code == 0, done.output
    first, *others = json.loads(file.read_text())["team"]["agents"]
    assert first["prompt_tokens"] == 64 + 96 + 16
    assert all(agent["translated_tokens"] > agent["prompt_tokens"] / 2 for agent in others)
