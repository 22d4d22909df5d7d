"""Whatever a command shows fits 80 columns: nothing is cut, and no word or number is broken."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from rich.console import Console, Group

from kedge.cli import bench_tables, demo, run
from kedge.cli.main import app
from kedge.cli.output import table_of
from kedge.runner.run import AgentResult, RunResult
from kedge.types import AgentId, RunId
from tests.cli.commands import WIDTH, shown
from tests.completions import completion

ROOT = Path(__file__).parents[2]
BORDER = "│╭╮╰╯─"


def commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """A command and those below it, by what one types."""
    yield name, command
    for child_name, child in getattr(command, "commands", {}).items():
        yield from commands(f"{name} {child_name}".strip(), child)


COMMANDS = dict(commands("", typer.main.get_command(app)))


def words(command: Any) -> Iterator[str]:
    """All that the help of a command must show in one piece."""
    children = getattr(command, "commands", {})
    for text in (command.help, *children, *(child.help for child in children.values())):
        yield from text.split()
    for parameter in command.params:
        is_option = parameter.param_type_name == "option"
        yield from (*parameter.opts, *parameter.secondary_opts) if is_option else ()
        yield from (parameter.metavar or "").split()
        yield from (parameter.help or "").split()


@pytest.mark.parametrize("name", COMMANDS, ids=lambda name: name or "kedge")
def test_help_is_shown_in_one_piece(name: str) -> None:
    text = shown(*name.split(), "--help", width=WIDTH, TERMINAL_WIDTH="")
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH and "…" not in text
    found = {word for line in lines for word in line.strip(BORDER).split()}
    assert not [word for word in words(COMMANDS[name]) if word not in found]


# tables ---------------------------------------------------------------------------------------------------------------


def stored(name: str) -> Any:
    """Results of a measurement, as the repository has them."""
    return json.loads(next(ROOT.glob(f"*/results/{name}")).read_text(encoding="utf-8"))


DEMO = {
    "agent": "mathematician",
    **dict.fromkeys(("ttft_dense_ms", "ttft_dense_p90_ms", "ttft_translated_ms", "ttft_translated_p90_ms"), 1234.5),
    **{"accuracy_dense": 1.0, "accuracy_translated": 1.0, "reuse_rate": 1.0},
    "tokens": {"exact": 1000, "translated": 3000, "computed": 4000},
}
RATES = dict.fromkeys(bench_tables.SESSION_COLUMNS, 0.1234)
SESSIONS = {
    "traces": {"mooncake_conversation": {"open": {"48": {"0.05": RATES, "1": RATES}}, "ceiling": {"48": 0.9876}}}
}


def tables() -> Iterator[tuple[str, Any]]:
    """Every table that the commands make, with results that are stored or as large as any."""
    done = completion("text", exact=1000, translated=10_000, computed=345)
    result = RunResult(RunId("run"), (AgentResult(AgentId("agent of long name"), 2, done),), 1.0)
    yield "run", run.receipts(result)
    yield "demo", demo.score_table([DEMO])
    for table in bench_tables.sessions(SESSIONS):
        yield "bench sessions", table
    widest = {"teams_per_min": 123.4, "ttft_p50_ms": 1234.5, "ttft_p99_ms": 1234.5, "latency_p50_s": 12.3}
    widest |= {"latency_p99_s": 12.3, "translated_share": 0.44, "computed_share": 0.38, "kl": 0.0005}
    widest |= {"proof_share": 0.22, "errors": 0}
    yield "bench load", bench_tables.load("warm", 60.0, {"32": {"translate": widest}})
    yield "bench fidelity", bench_tables.fidelity(stored("fidelity-served-reading.json"))
    for case in stored("vllm-cycle.json")["cases"]:
        yield "bench vllm, cycle", next(bench_tables.vllm_flow(case))


TABLES = list(tables())


def drawn(item: object) -> str:
    console = Console(width=WIDTH, file=io.StringIO())
    console.print(item)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("group", [table for _, table in TABLES], ids=[name for name, _ in TABLES])
def test_a_table_is_shown_in_one_piece(group: Group) -> None:
    text = drawn(group)
    table: Any = group.renderables[-1]
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "…" not in text
    pieces = [piece for column in table.columns for piece in (*column.cells, *str(column.header).split())]
    around = f" {text} ".replace("\n", " \n ")
    assert [piece for piece in pieces if f" {piece} " not in around] == []


def test_only_a_name_without_room_is_folded() -> None:
    text = drawn(table_of("long", ("agent", "ms"), [["x" * 100, "1234.5"]]))
    assert " 1234.5 " in text.replace("\n", " ")
    assert (text.count("x"), "…" in text) == (100, False)
