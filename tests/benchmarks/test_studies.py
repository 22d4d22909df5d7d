"""The papers' experiments: what their rows hold, how seeds are averaged, and the commands."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from errno import ENOSPC
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.cli import ABOUT
from benchmarks.studies import papers
from benchmarks.studies.papers import STUDIES
from benchmarks.studies.study import QUICK, StudySettings, averaged, shown
from kedge.cli.main import EXIT_BAD_INPUT, app
from kedge.cli.results import write
from kedge.errors import ConfigError

TINY = {"questions": 1, "taught": 0, "agents": 2}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_study_has_a_command() -> None:
    assert set(ABOUT) == set(STUDIES)
    for name, study in STUDIES.items():
        assert study.name == name
        assert study.paper
        assert study.settings(quick=True).questions <= 10


def test_what_is_given_wins() -> None:
    study = STUDIES["order"]
    assert study.settings(quick=False) == StudySettings()
    quick = study.settings(quick=True, questions=3, task=None)
    assert (quick.questions, quick.task, quick.seeds, quick.quick) == (3, QUICK["task"], 1, True)


def test_seeds_are_averaged() -> None:
    trials = [
        [{"method": "a", "layer": 1, "kl": 1.0, "top1": None}],
        [{"method": "a", "layer": 1, "kl": 3.0, "top1": 0.5}],
    ]
    assert averaged(trials) == [
        {"method": "a", "layer": 1, "kl": 2.0, "kl_sd": pytest.approx(math.sqrt(2)), "top1": 0.5, "top1_sd": None}
    ]
    assert averaged(trials[:1]) == trials[0]


def test_no_seeds_is_an_error() -> None:
    with pytest.raises(ConfigError, match="seeds=0"):
        STUDIES["order"].run(StudySettings(seeds=0))


@pytest.mark.parametrize("name", ["order"])
def test_rows_have_what_the_figure_shows(name: str) -> None:
    study = STUDIES[name]
    rows = study.run(study.settings(quick=True, **TINY))
    assert rows
    assert all({study.plot.x, study.plot.by, *study.plot.ys} <= set(row) for row in rows)


def test_accuracy_has_every_method_and_team() -> None:
    several = STUDIES["accuracy"].settings(quick=True, **{**TINY, "agents": 0})
    rows = STUDIES["accuracy"].run(several)
    methods = ("dense", "epic", "cacheblend", "relay", "kvcomm", "token", "kedge")
    assert [(row["agents"], row["method"]) for row in rows] == [(agents, name) for agents in (2, 3) for name in methods]
    for row in rows:
        times = row["ttft_ms"], row["teams_per_minute"]
        assert (times == (None, None)) == (row["method"] in ("cacheblend", "relay"))
        assert 0 < row["computed_tokens"] <= 1
        assert row["judge_consistency"] in (0, 1), "one question"
    dense = [row for row in rows if row["method"] == "dense"]
    assert all(row["accuracy"] == row["accuracy_dense"] and row["same_final_answer"] == 1 for row in dense)


def test_a_task_is_asked_of_the_teams_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The team that reads has three agents, two less than others."""
    asked: list[int] = []
    monkeypatch.setattr(papers, "compared", lambda settings, *_, **__: asked.append(settings.agents) or {})
    study = STUDIES["accuracy"]
    for task in ("reading", "math"):
        study.run(study.settings(quick=False, task=task, seeds=1))
    assert asked == [2, 3, 2, 3, 4, 5]


@pytest.mark.parametrize("quick", [False, True])
def test_one_size_of_the_team_can_be_chosen(quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(papers, "compared", lambda settings, *_, **__: asked.append(settings.agents) or {})
    study = STUDIES["accuracy"]
    study.run(study.settings(quick=quick, agents=5, seeds=1))
    assert asked == [5]


@pytest.mark.parametrize("name", ["accuracy", "order"])
def test_methods_can_be_chosen(name: str, tmp_path: Path) -> None:
    command = ["bench", name, "--quick", "--questions", "1", "--agents", "2", "--methods", "exact,interpolate"]
    ran = CliRunner().invoke(app, [*command, "--json", str(tmp_path / "rows.json")])
    assert ran.exit_code == 0, ran.output
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["method"] for row in rows[:2]] == ["exact", "interpolate"]
    assert {row.get("agents", 2) for row in rows} == {2}


def test_a_command_writes_results_and_a_figure(tmp_path: Path) -> None:
    file, plot = tmp_path / "order.json", tmp_path / "order.png"
    sizes = ["--quick", "--task", "code", "--questions", "1", "--methods", "exact"]
    done = CliRunner().invoke(app, ["bench", "order", *sizes, "--json", str(file), "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    data = json.loads(file.read_text())
    assert {"machine", "study", "title", "paper", "settings", "seconds", "rows"} <= set(data)
    assert data["settings"]["task"] == "code"
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_a_narrow_table_loses_no_digit(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(settings: StudySettings, seed: int, note: object) -> list[dict[str, float]]:  # noqa: ARG001
        return [{f"what_was_measured_{column}": 0.123 for column in range(12)}]

    monkeypatch.setattr(papers, "STUDIES", {"order": replace(STUDIES["order"], measure=measure)})
    ran = CliRunner().invoke(app, ["bench", "order", "--seeds", "1"], env={"COLUMNS": "60"})
    table = ran.output.split("The paper")[0]
    assert "…" not in table
    assert [table.count(digit) for digit in "23"] == [12 + 1, 12 + 1], "and once in a heading"


def test_rows_are_shown_with_their_spread() -> None:
    rows = [
        {
            "mib": 1234.5,
            "kl": 0.12345,
            "kl_sd": 0.0678,
            "reuse_rate": 0.5,
            "reuse_rate_sd": None,
            "accuracy": None,
            "agents": 3,
        }
    ]
    assert shown(rows) == [{"mib": "1234", "kl": "0.1235 ±0.068", "reuse rate": "0.5", "accuracy": "–", "agents": "3"}]


def test_a_study_goes_on_where_it_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def measure(settings: StudySettings, seed: int, note: object) -> list[dict[str, float]]:  # noqa: ARG001
        seeds.append(seed)
        return [{"tokens": 1.0 + seed}]

    order = replace(STUDIES["order"], measure=measure)
    monkeypatch.setattr(papers, "STUDIES", {**STUDIES, "order": order})
    file = tmp_path / "rows.json"

    def run(*more: str) -> tuple[int, list[dict[str, float]]]:
        ran = CliRunner().invoke(app, ["bench", "order", "--json", str(file), *more])
        return ran.exit_code, json.loads(file.read_text())["rows"]

    assert run("--seeds", "1", "--resume") == (0, [{"tokens": 1.0}])
    assert run("--seeds", "3", "--resume") == (0, [{"tokens": 2.0, "tokens_sd": 1.0}])
    assert seeds == [0, 1, 2]
    code, rows = run("--seeds", "3", "--resume", "--agents", "2")
    assert (code != 0, rows) == (True, [{"tokens": 2.0, "tokens_sd": 1.0}]), "another study's file is left alone"
    assert run("--seeds", "1") == (0, [{"tokens": 1.0}])
    assert seeds == [0, 1, 2, 0]


def test_resuming_needs_a_file() -> None:
    ran = CliRunner().invoke(app, ["bench", "order", "--resume"])
    assert ran.exit_code != 0
    assert "--json" in ran.output


@pytest.mark.parametrize(("held", "said"), [("{", "is not valid JSON"), ("[]", "holds results of another study")])
def test_a_file_that_cannot_be_resumed_is_named(held: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(held)
    ran = CliRunner().invoke(app, ["bench", "order", "--resume", "--json", str(file)])
    assert ran.exit_code == EXIT_BAD_INPUT
    assert f"error: json={str(file)!r}: {said}" in ran.output
    assert file.read_text() == held


def test_a_write_that_fails_leaves_the_results_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.json"
    write(file, {"rows": [1]})
    whole = Path.write_text

    def fill_the_disk(self: Path, text: str, **how: str) -> int:
        whole(self, text[:9], **how)
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fill_the_disk)
    with pytest.raises(OSError, match="No space"):
        write(file, {"rows": [1, 2]})
    assert json.loads(file.read_text())["rows"] == [1]


def test_an_unknown_task_is_one_line() -> None:
    done = CliRunner().invoke(app, ["bench", "accuracy", "--quick", "--task", "chess"])
    assert done.exit_code == 2
