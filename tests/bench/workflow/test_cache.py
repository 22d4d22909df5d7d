"""`kedge bench cache`: it runs, says what it measured, and the targets hold where they are easy to see."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kedge.bench.workflow.cache import CacheSettings, OperationTimes, growth, measure
from kedge.cli.main import app

SMALL = CacheSettings(blocks=(1_000, 4_000), agents=(10, 40), repeats=5)


def test_every_operation_is_measured_at_every_size() -> None:
    result = measure(SMALL).as_json()
    assert [one["size"] for one in result["blocks"]] == [1_000, 4_000]
    assert [one["size"] for one in result["agents"]] == [10, 40]
    for sizes in ("blocks", "agents"):
        for name, fit in result["growth"][sizes].items():
            assert set(fit) == {"exponent", "to_log"}
            assert all(one[name] > 0 for one in result[sizes])


@pytest.mark.parametrize(("micros", "exponent", "to_log"), [((2, 2, 2), 0, 0.333), ((1, 10, 100), 1, 33.333)])
def test_growth_is_fitted(micros: tuple[float, ...], exponent: float, to_log: float) -> None:
    times = [OperationTimes(size, {"x": time}) for size, time in zip((10, 100, 1000), micros, strict=True)]
    assert growth(times) == {"x": {"exponent": exponent, "to_log": to_log}}


def test_bench_cache_writes_json(tmp_path: Path) -> None:
    file = tmp_path / "cache.json"
    done = CliRunner().invoke(app, ["bench", "cache", "--quick", "--repeats", "3", "--json", str(file)])
    assert done.exit_code == 0, done.output
    data = json.loads(file.read_text())
    assert {"settings", "machine", "blocks", "agents", "growth"} <= set(data)
    assert "match" in done.output
