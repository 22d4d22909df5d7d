"""`kedge bench`: every measurement has a quick form, whatever else is given wins, and a checkout has more of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from kedge.bench.flows import with_given
from kedge.bench.sessions.arrivals import QUICK, SessionBenchSettings
from kedge.cli import checkout
from kedge.cli.bench import bench
from kedge.cli.main import app

MEASUREMENTS = typer.main.get_command(bench).commands  # type: ignore[attr-defined]


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be no checkout, as where Kedge was installed from a wheel."""
    monkeypatch.setattr(checkout, "_root", lambda: None)


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_every_measurement_has_a_quick_form(name: str) -> None:
    assert any("--quick" in parameter.opts for parameter in MEASUREMENTS[name].params)


def test_what_is_given_wins_over_quick() -> None:
    assert with_given(QUICK, requests=50, live=None) == replace(QUICK, requests=50)
    assert with_given(SessionBenchSettings(), cap=9.0) == SessionBenchSettings(cap=9.0)


def test_a_checkout_lists_its_benchmarks_too() -> None:
    shown = CliRunner().invoke(app, ["bench", "--help"]).output
    assert all(f" {name} " in shown for name in (*MEASUREMENTS, *checkout.COMMANDS))


@pytest.mark.usefixtures("outside")
def test_outside_of_a_checkout_there_are_few_commands() -> None:
    group = typer.main.get_command(app)
    shown = CliRunner().invoke(app, ["bench", "--help"]).output
    assert all(f" {name} " in shown for name in MEASUREMENTS)
    assert not any(f" {name} " in shown for name in checkout.COMMANDS)
    assert len(group.commands) + len(MEASUREMENTS) <= 12  # type: ignore[attr-defined]


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize(
    ("asked", "key"),
    [
        (["workflow", "--quick"], "bench='workflow'"),
        (["accuracy"], "bench='accuracy'"),
        (["vllm", "--case", "team"], "case='team'"),
        (["sessions", "--full"], "--full='sessions'"),
    ],
)
def test_outside_of_a_checkout_a_benchmark_is_one_line(
    asked: list[str], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kedge.cli.bench.require_packages", lambda *_: None)
    done = CliRunner().invoke(app, ["bench", *asked])
    assert done.exit_code == 2
    assert done.stderr == f"error: {key}: is in benchmarks/ of Kedge's repository: run it in a checkout\n"


@pytest.mark.usefixtures("outside")
def test_what_there_is_nowhere_is_a_usage_error() -> None:
    assert "No such command" in CliRunner().invoke(app, ["bench", "chess"]).output


def test_the_current_folder_may_be_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkout, "__file__", str(tmp_path / "a" / "b" / "c" / "checkout.py"))
    monkeypatch.chdir(tmp_path)
    assert not checkout.is_there()
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "cli.py").touch()
    (tmp_path / "src" / "kedge" / "cli").mkdir(parents=True)
    assert checkout.is_there()
