"""Whatever a benchmark shows fits 80 columns: nothing is cut, and no word or number is broken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from rich.console import Group
from typer.testing import CliRunner

from benchmarks import tables
from benchmarks.cli import benchmarks
from benchmarks.ttft import TtftSettings
from kedge.cli.bench_tables import vllm_flow
from kedge.cli.main import app
from tests.cli.test_terminal import BORDER, WIDTH, assert_in_one_piece, stored, words

GROUP: Any = typer.main.get_command(benchmarks)


@pytest.mark.parametrize("name", GROUP.commands)
def test_help_is_shown_in_one_piece(name: str) -> None:
    done = CliRunner().invoke(app, ["bench", name, "--help"], env={"COLUMNS": str(WIDTH), "TERMINAL_WIDTH": ""})
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "…" not in done.output
    seen = {word for line in lines for word in line.strip(BORDER).split()}
    assert [word for word in words(GROUP.commands[name]) if word not in seen] == []


@pytest.mark.parametrize("name", list(GROUP.commands))
def test_every_measurement_has_a_quick_form(name: str) -> None:
    assert any("--quick" in parameter.opts for parameter in GROUP.commands[name].params)


CLOSED = dict.fromkeys(("hit", "turns_per_min", "ttft_p50_s", "ttft_p99_s"), 1234.5)
BESIDE = {
    "traces": {
        "mooncake_conversation": {
            "closed": {"48": {"lru": CLOSED, "kedge_host4": {**CLOSED, "ttft_p50_s": None}}},
        }
    },
    "cost": {"us_per_request": 123.4, "ns_per_block": 1234.5, "ns_per_block_lru": 1234.5},
}


def made() -> Iterator[tuple[str, Any]]:
    """Every table of results that are stored, or that are as large as any."""
    yield "sessions, closed loop", next(tables.sessions_beside(BESIDE))
    yield "ttft", tables.ttft(TtftSettings(), stored("ttft-32m-token.json"))
    yield "vllm, team", next(tables.vllm_team(stored("vllm-team.json")["team"]))
    for name in ("workflow-figure5.json", "workflow-figure6.json"):
        yield name, tables.workflow(stored(name))
    yield "vllm, flows", next(vllm_flow(stored("vllm-flows.json")["cases"][0]))
    yield "vllm, sessions", next(tables.vllm_sessions(stored("vllm-sessions.json")["sessions"]))
    row = {"right": 0.9875, "same_final_answer": 1.0, "same_answers": None, "calls_translated": 0.5, "computed": 0.25}
    yield "accuracy", tables.accuracy("reading-picks", [{"method": "token:weak_error=0.25", **row, "ttft_ms": 1234.5}])
    fault = {"agent": "final", "off_after": None, "lived": 50, "changed_served": 50, "far": 1.0}
    yield "guard", tables.guard({"poisoned_anchors": {**fault, "kl_before": 0.000_51, "kl": 0.0025}})


MADE = list(made())


@pytest.mark.parametrize("table", [table for _, table in MADE], ids=[name for name, _ in MADE])
def test_a_table_is_shown_in_one_piece(table: Group) -> None:
    assert_in_one_piece(table)


def test_the_costs_of_sessions_are_one_line() -> None:
    *_, line = tables.sessions_beside(BESIDE)
    assert line == "cost: 123 us per request, 1234 ns per block (LRU: 1234 ns)"
    assert list(tables.sessions_beside({"traces": {"a": {}}})) == []
