"""`kedge bench sessions`: its tables on 80 columns, and its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kedge.bench.sessions.arrivals import SLICE
from kedge.bench.sessions.measure import COLUMNS
from kedge.cli.bench_tables import SESSION_COLUMNS
from kedge.cli.main import app

SHORT = ["bench", "sessions", "--live", "2", "--capacity", "0.1", "--capacity", "0.5", "--requests", "60"]
MOONCAKE = [
    {"timestamp": 1000 * at, "input_length": 1200, "output_length": 7, "hash_ids": [0, at, 100]} for at in range(2, 9)
]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("COLUMNS", "80")
    return CliRunner()


def test_every_column_has_a_heading() -> None:
    assert set(COLUMNS) <= set(SESSION_COLUMNS)


def test_it_runs_offline_on_the_trace_that_ships(cli: CliRunner, tmp_path: Path) -> None:
    file = tmp_path / "sessions.json"
    done = cli.invoke(app, [*SHORT, "--cap", "60", "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "claude_code_slice, 2 live" in done.stdout
    saved = json.loads(file.read_text())
    asked = {"live": [2], "capacities": [0.1, 0.5], "cap": 60.0, "requests": 60, "seed": 0}
    assert saved["settings"] == asked
    assert saved["machine"]["kedge"]
    cells = saved["traces"]["claude_code_slice"]["open"]["2"]
    assert list(cells) == ["0.1", "0.5"] and all(list(cell) == list(COLUMNS) for cell in cells.values())


def test_several_traces_are_replayed(cli: CliRunner, tmp_path: Path) -> None:
    trace, file = tmp_path / "chat.jsonl", tmp_path / "sessions.json"
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in MOONCAKE))
    both = ["--trace", str(trace), "--trace", str(SLICE)]
    done = cli.invoke(app, [*SHORT, *both, "--json", str(file)])
    assert done.exit_code == 0, done.output
    traces = json.loads(file.read_text())["traces"]
    assert {name: list(trace["open"]) for name, trace in traces.items()} == {
        "chat": ["recorded"],
        "claude_code_slice": ["2"],
    }


def test_a_bad_line_is_one_line_of_error(cli: CliRunner, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"s": "x"}\n')
    done = cli.invoke(app, [*SHORT, "--trace", str(trace)])
    assert done.exit_code == 2
    assert "line 1: c is {'s': 'x'}: Field required" in " ".join(done.output.split())
