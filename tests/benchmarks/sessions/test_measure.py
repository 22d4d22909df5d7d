"""All that is measured of sessions: every column within Belady's bound, the closed loop, and costs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.sessions.closed import Leaves
from benchmarks.sessions.measure import COLUMNS, measure
from kedge.bench.sessions.arrivals import QUICK, SLICE, Conversation, load_traces
from kedge.cli.bench_tables import SESSION_COLUMNS
from kedge.cli.main import app
from tests.bench.sessions.builders import AGENT, write

SETTINGS = replace(QUICK, capacities=(0.25,), requests=120)


def no_loop(*_: object) -> Leaves:
    return {}


def test_every_column_has_a_heading() -> None:
    assert list(SESSION_COLUMNS) == list(COLUMNS)


def test_every_cell_has_every_column_and_belady_is_the_bound() -> None:
    said: list[str] = []
    data = measure(replace(SETTINGS, live=(2, 4)), load_traces([SLICE]), no_loop, said.append)
    assert json.loads(json.dumps(data)) == data
    (trace,) = data["traces"].values()
    assert list(trace["open"]) == ["2", "4"] and trace["closed"] == {}
    for live in ("2", "4"):
        cell = trace["open"][live]["0.25"]
        assert list(cell) == list(COLUMNS)
        assert all(cell[name] <= cell["belady"] + 0.001 for name in ("lru", "kedge"))
        assert cell["belady"] <= cell["kedge_host3"] <= trace["ceiling"][live]
        assert trace["working_set_blocks"][live] > 0
    assert set(data["cost"]) == {"us_per_request", "ns_per_block", "ns_per_block_lru"}
    assert said[0] == "claude_code_slice, 2 live, 0.25 of the working set" and said[-1] == "cost"


def test_the_closed_loop_of_every_trace_is_kept(tmp_path: Path) -> None:
    figures: Leaves = {"8": {"lru": {"hit": 0.5, "ttft_p50_s": None}}}
    mine = load_traces([write(tmp_path / "mine.jsonl", [AGENT] * 3)])
    said: list[str] = []

    def closed_loop(conversations: Sequence[Conversation], progress: Callable[[str], None]) -> Leaves:
        progress("closed")
        return figures if conversations is mine[0].conversations else {}

    result = measure(SETTINGS, mine, closed_loop, said.append)
    assert result["traces"]["mine"]["closed"] == figures
    assert "mine, closed" in said


def test_the_command_prints_and_writes_all_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "sessions.json"
    asked = ["--live", "2", "--capacity", "0.5", "--requests", "60"]
    done = CliRunner().invoke(app, ["bench", "sessions", "--full", *asked, "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert "claude_code_slice, closed loop" in done.stdout and "cost: " in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    cells = json.loads(file.read_text())["traces"]["claude_code_slice"]["open"]["2"]
    assert list(cells["0.5"]) == list(COLUMNS)
