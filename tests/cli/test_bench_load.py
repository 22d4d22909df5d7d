"""`kedge bench load`: its file, its table on 80 columns, and how it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kedge.cli.main import app

LEAF = {
    "teams_per_min", "ttft_p50_ms", "ttft_p99_ms", "latency_p50_s", "latency_p99_s", "translated_share",
}  # fmt: skip
SHORT = [
    "bench",
    "load",
    "--case",
    "tiny",
    "--model-size",
    "tiny",
    "--clients",
    "2",
    "--seconds",
    "1",
    "--device",
    "cpu",
]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("COLUMNS", "80")
    return CliRunner()


def test_the_file_has_a_leaf_for_every_mode_and_the_table_a_row_of_80_columns(cli: CliRunner, tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    memory = ["--kv-memory", "512MiB", "--anchor-memory", "1GiB", "--base-memory", "256MiB"]
    done = cli.invoke(app, [*SHORT, *memory, "--json", str(file)])
    assert done.exit_code == 0, done.output
    saved = json.loads(file.read_text())
    assert saved["cases"].keys() == {"tiny"} and saved["cases"]["tiny"].keys() == {"2"}
    modes = saved["cases"]["tiny"]["2"]
    assert list(modes) == ["off", "exact", "translate"]
    assert all(leaf.keys() >= LEAF for leaf in modes.values())
    assert saved["machine"]["kedge"]
    assert saved["settings"]["seconds"] == 1
    asked = {"kv_memory": "512MiB", "anchor_memory": "1GiB", "base_memory": "256MiB"}
    assert asked.items() <= saved["settings"].items()
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in done.stdout
    assert any(line.split()[:2] == ["2", "translate"] for line in lines)
