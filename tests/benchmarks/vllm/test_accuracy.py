"""`kedge bench vllm --case accuracy`: what is asked, what is counted, and a small run on real vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import tables
from benchmarks.vllm import cases as bench
from benchmarks.vllm.cases import AccuracySettings, accuracy_figures, scores, settle
from kedge.bench.demo import AgentScore, Comparison, TeamScore
from kedge.cli.main import app
from kedge.engine.echo import EchoEngine
from kedge.types import AgentId, GenerateRequest, ReuseMode
from kedge.workloads.miniature import TASKS

TEAM = ("reader", "final")


def score(correct: int, finals: list[str | None], translated_calls: int = 0) -> TeamScore:
    """Two agents with four calls each."""
    agents = {
        AgentId(name): AgentScore(AgentId(name), [1.0] * 4, correct, translated_calls, 40, 30, 10) for name in TEAM
    }
    return TeamScore(agents, finals)


def test_figures_are_shares_of_answers_and_counts_of_calls_and_tokens() -> None:
    found = Comparison(score(4, ["a", "b", None, "c"]), score(3, ["a", "x", None, "c"], translated_calls=2))
    data = accuracy_figures({"vllm": {"math": found}})
    assert data["vllm"]["math"] == {
        "agents": [{"agent": name, "accuracy_dense": 1.0, "accuracy_translated": 0.75} for name in TEAM],
        "same_final_answer": 0.5,
        "same_answers": 0.0,
        "calls": 8,
        "translated_calls": 4,
        "tokens": {"exact": 80, "translated": 60, "computed": 20},
    }
    (row,) = next(tables.vllm_accuracy(json.loads(json.dumps(data)))).rows
    assert row == ["vllm", "math", "100 100", "75 75", "50", "50", "-", "-"]


class Asked(EchoEngine):
    """An engine that notes what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[GenerateRequest] = []

    def submit(self, request: GenerateRequest) -> Any:
        self.asked.append(request)
        return super().submit(request)


def test_every_team_answers_the_same_questions_twice_and_densely_second() -> None:
    notes: list[str] = []
    settled: list[int] = []
    with Asked() as engine:
        found = scores(engine, lambda: settled.append(len(engine.asked)), AccuracySettings(questions=2), notes.append)
        asked = engine.asked
    assert found.keys() == TASKS.keys()
    agents = sum(len(one.dense.agents) for one in found.values())
    assert len(asked) == 2 * 2 * agents
    assert len(settled) == 2 * 2 * len(TASKS) and settled[0] == 0
    for name, both in found.items():
        assert len(both.dense.finals) == len(both.translated.finals) == 2, name
    modes = [request.reuse for request in asked]
    assert [mode for mode, after in zip(modes, [*modes[1:], None], strict=True) if mode is not after] == [
        ReuseMode.TRANSLATE, ReuseMode.OFF,
    ] * len(TASKS)  # fmt: skip
    first, last = notes[0], notes[-1]
    assert first == "math, translate: 1 of 2 questions" and last == "code, off: 2 of 2 questions"


class Bases:
    """An engine with base prefills that end one by one."""

    def __init__(self, left: int) -> None:
        self._left: Iterator[int] = iter(range(left, -1, -1))

    def inspect(self) -> dict[str, Any]:
        return {"requests": {"base_prefills": next(self._left, 0)}}


def test_it_waits_for_base_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(bench.time, "sleep", naps.append)
    engine: Any = Bases(3)
    settle(engine)
    assert len(naps) == 3


def test_base_prefills_that_never_end_are_an_error() -> None:
    class Stuck(Bases):
        def inspect(self) -> dict[str, Any]:
            return {"requests": {"base_prefills": 2}}

    engine: Any = Stuck(0)
    with pytest.raises(TimeoutError, match="2 base prefills"):
        settle(engine, seconds=0)


@pytest.mark.slow
def test_a_small_run_on_real_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    monkeypatch.setattr("benchmarks.vllm.cases.QUICK_ACCURACY", AccuracySettings(tasks=("math",)))
    file = tmp_path / "vllm.json"
    arguments = ["bench", "vllm", "--quick", "--case", "accuracy", "--questions", "10", "--json", str(file)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())["accuracy"]
    assert found.keys() == {"vllm", "embedded"}
    for engine, tasks in found.items():
        (row,) = tasks.values()
        assert row["calls"] == 10 * len(row["agents"]), engine
        assert row["translated_calls"] > 0 and row["tokens"]["translated"] > 0, engine
        assert [agent["accuracy_dense"] for agent in row["agents"]] == [1.0] * len(row["agents"]), engine
