"""The open loop of traces: its figures, its bounds and what a file of results has."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kedge.bench.sessions.arrivals import QUICK, RECORDED, SLICE, SessionBenchSettings, load_traces, traffic_of
from kedge.bench.sessions.measure import COLUMNS, measure
from kedge.errors import ConfigError
from tests.bench.sessions.builders import AGENT, MOONCAKE, write

SETTINGS = replace(QUICK, capacities=(0.25,), requests=120)


def test_every_cell_has_every_column() -> None:
    said: list[str] = []
    result = measure(replace(SETTINGS, live=(2, 4)), load_traces([SLICE]), progress=said.append)
    (trace,) = result.values()
    assert json.loads(json.dumps(trace)) == trace
    assert list(trace["open"]) == ["2", "4"]
    for live in ("2", "4"):
        cell = trace["open"][live]["0.25"]
        assert list(cell) == list(COLUMNS)
        assert all(rate <= trace["ceiling"][live] for rate in cell.values())
        assert trace["working_set_blocks"][live] > 0
    assert said[0] == "claude_code_slice, 2 live, 0.25 of the working set"


def test_mooncake_is_replayed_as_recorded(tmp_path: Path) -> None:
    lines = [{**MOONCAKE, "timestamp": 1000 * at, "hash_ids": [0, at, 100]} for at in range(1, 9)]
    (trace,) = load_traces([write(tmp_path / "m.jsonl.gz", lines)])
    (found,) = traffic_of(trace, SessionBenchSettings(requests=6))
    assert (trace.name, found.live, len(found.arrivals), found.working_set) == ("m", RECORDED, 6, 8)
    assert [found.capacity(share) for share in (0.01, 0.25, 1.0)] == [1, 2, 8]


def test_two_traces_of_a_name_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    files = [write(tmp_path / "t.jsonl", [AGENT]), write(tmp_path / "other" / "t.jsonl.gz", [AGENT])]
    with pytest.raises(ConfigError, match="is the second trace named t"):
        load_traces(files)


def test_a_trace_of_prompts_that_are_too_long_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no conversation whose prompts are all short enough"):
        load_traces([write(tmp_path / "t.jsonl", [{**AGENT, "n": 200_001}])])


def test_prompts_without_a_full_block_are_replayed_too(tmp_path: Path) -> None:
    line = {**AGENT, "n": 100, "h": [[0, 1]]}
    result = measure(SETTINGS, load_traces([write(tmp_path / "t.jsonl", [line] * 3)]))
    assert set(result["t"]["open"]["8"]["0.25"].values()) == {0.0}


def test_the_slice_says_where_it_is_from_and_under_which_licence() -> None:
    text = (SLICE.parent / "README.md").read_text(encoding="utf-8")
    assert SLICE.name in text and "Apache License 2.0" in text
    assert "Apache License" in (SLICE.parent / "LICENSE-APACHE-2.0.txt").read_text(encoding="utf-8")
    assert SLICE.stat().st_size < 60_000
