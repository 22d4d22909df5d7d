"""`kedge bench`: quick forms, what a checkout adds, and what measurements write and show on 80 columns."""

from dataclasses import replace
from pathlib import Path

import pytest
import typer.main

from kedge.bench.flows import with_given
from kedge.bench.sessions.arrivals import QUICK, SLICE
from kedge.bench.sessions.measure import COLUMNS
from kedge.cli import bench as command
from kedge.cli.bench_tables import SESSION_COLUMNS
from tests.bench.sessions.builders import MOONCAKE, write
from tests.cli.commands import kedge, measured

MEASUREMENTS = typer.main.get_command(command.bench).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_every_measurement_has_a_quick_form(name: str) -> None:
    assert any("--quick" in parameter.opts for parameter in MEASUREMENTS[name].params)


def test_what_is_given_wins_over_quick() -> None:
    assert with_given(QUICK, requests=50, live=None) == replace(QUICK, requests=50)


def test_a_checkout_lists_its_benchmarks_too() -> None:
    shown = kedge("bench", "--help").output
    assert all(f" {name} " in shown for name in (*MEASUREMENTS, "ttft", "workflow", "guard", "accuracy"))


def test_outside_of_a_checkout_there_are_few_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As where Kedge was installed from a wheel."""
    monkeypatch.setattr(command, "__file__", str(tmp_path / "a" / "b" / "c" / "bench.py"))
    monkeypatch.chdir(tmp_path)
    shown = kedge("bench", "--help").output
    assert all(f" {name} " in shown for name in MEASUREMENTS) and " ttft " not in shown
    assert "No such command" in kedge("bench", "ttft").output
    full = kedge("bench", "sessions", "--full")
    assert full.exit_code == 2 and "is in benchmarks/ of Kedge's repository" in " ".join(full.stderr.split())
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "cli.py").touch()
    (tmp_path / "src" / "kedge" / "cli").mkdir(parents=True)
    assert command.benchmarks("cli"), "the current folder may be the checkout"


def test_load_writes_a_leaf_and_shows_a_row_for_every_mode(tmp_path: Path) -> None:
    sizes = "--case tiny --model-size tiny --clients 2 --seconds 1 --device cpu --kv-memory 512MiB"
    saved, shown = measured(tmp_path, "bench", "load", *sizes.split())
    modes = saved["cases"]["tiny"]["2"]
    assert list(modes) == ["off", "exact", "translate"]
    assert all(leaf["teams_per_min"] > 0 for leaf in modes.values())
    assert saved["machine"]["kedge"]
    assert (saved["settings"]["seconds"], saved["settings"]["kv_memory"]) == (1, "512MiB")
    assert any(line.split()[:2] == ["2", "translate"] for line in shown.splitlines())


def test_sessions_replays_several_traces_offline(tmp_path: Path) -> None:
    lines = ({**MOONCAKE, "timestamp": 1000 * at, "hash_ids": [0, at, 100]} for at in range(2, 9))
    trace = write(tmp_path / "chat.jsonl", lines)
    sizes = "--live 2 --capacity 0.1 --capacity 0.5 --requests 60 --cap 60"
    both = ["--trace", str(trace), "--trace", str(SLICE)]
    saved, shown = measured(tmp_path, "bench", "sessions", *sizes.split(), *both)
    assert "claude_code_slice, 2 live" in shown
    assert saved["settings"] == {"live": [2], "capacities": [0.1, 0.5], "cap": 60.0, "requests": 60, "seed": 0}
    found = {name: list(trace["open"]) for name, trace in saved["traces"].items()}
    assert found == {"chat": ["recorded"], "claude_code_slice": ["2"]}
    cells = saved["traces"]["claude_code_slice"]["open"]["2"]
    assert list(cells) == ["0.1", "0.5"] and all(list(cell) == list(COLUMNS) for cell in cells.values())
    best = saved["traces"]["claude_code_slice"]["ceiling"]["2"]
    assert all(rate <= best for cell in cells.values() for rate in cell.values())
    assert set(COLUMNS) <= set(SESSION_COLUMNS)
