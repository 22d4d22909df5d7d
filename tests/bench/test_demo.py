"""`kedge demo` writes what it measured."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from kedge.cli.main import app


def test_demo_writes_json(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    done = CliRunner().invoke(app, ["demo", "--questions", "2", "--json", str(file)])
    assert done.exit_code == 0, done.output
    data = json.loads(file.read_text())
    assert {"agents", "accuracy_dense", "accuracy_translated", "same_final_answer", "tokens"} <= set(data)
    assert {"agent", "ttft_dense_ms", "ttft_translated_ms", "reuse_rate"} <= set(data["agents"][0])
    assert set(data["tokens"]) == {"exact", "translated", "computed"}
    assert "toy" in done.output, "nobody takes its answers for more"
