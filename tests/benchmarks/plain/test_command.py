"""`kedge bench plain`: its table on 80 columns and its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kedge.cli.main import app
from tests.bench.sessions.builders import AGENT, write


def test_it_runs_offline_on_the_trace_that_ships(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "plain.json"
    done = CliRunner().invoke(
        app, ["bench", "plain", "--case", "links", "--live", "4", "--requests", "200", "--json", str(file)]
    )
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines())) <= 80 and "claude_code_slice" in done.stdout
    saved = json.loads(file.read_text())
    size = {name: saved["settings"][name] for name in ("cases", "live", "requests", "seed")}
    assert size == {"cases": ["links"], "live": 4, "requests": 200, "seed": 0}
    links = saved["links"]["claude_code_slice"]
    assert links["requests"] == 200 and links["right"] >= 0.95 and links["wrong"] <= 0.01
    assert set(saved["cost"]) == {"us_per_request", "us_per_request_sessions", "ns_per_token"}


def test_a_trace_is_replayed_in_its_own_blocks_and_once(tmp_path: Path) -> None:
    turns = [{**AGENT, "turn": at, "t": 10.0 * at, "n": 64 * (at + 1), "h": [[0, at + 1]]} for at in range(6)]
    trace, file = write(tmp_path / "grown.jsonl", turns), tmp_path / "plain.json"
    done = CliRunner().invoke(app, ["bench", "plain", "--case", "links", "--trace", str(trace), "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert json.loads(file.read_text())["links"]["grown"] == {"requests": 6, "right": 1.0, "wrong": 0.0}


def test_an_unknown_case_is_refused_with_those_that_there_are() -> None:
    done = CliRunner().invoke(app, ["bench", "plain", "--case", "chess"])
    assert done.exit_code == 2 and "links, sessions, gain, teams" in " ".join(done.output.split())
