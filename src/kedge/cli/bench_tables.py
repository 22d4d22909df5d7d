"""The tables of `kedge bench`, made of the same data that `--json` writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType

from kedge.cli.tables import table_of

Row = Mapping[str, Any]
LOAD_COLUMNS = {
    "teams per min": ("teams_per_min", ".1f"),
    "TTFT p50": ("ttft_p50_ms", ".0f"),
    "TTFT p99": ("ttft_p99_ms", ".0f"),
    "run p50": ("latency_p50_s", ".1f"),
    "run p99": ("latency_p99_s", ".1f"),
    "reused": ("translated_share", ".0%"),
    "computed": ("computed_share", ".0%"),
    "KL": ("kl", ".4f"),
    "proof": ("proof_share", ".0%"),
}
"""Heading -> figure and its format."""
SESSION_COLUMNS = {"belady": "Belady", "lru": "LRU", "kedge": "Kedge", "kedge_host3": "host x3"}
"""Figure -> heading."""


def fidelity(data: Row) -> Group:
    """Return the table of yardsticks and methods: KL with its interval, and beside that of fp8 KV."""
    headings = ("prompt KV", "KL", "95 %", "fp8's", "top-1", "same", "computed", "moved", "TTFT ms")
    rows = {**data["yardsticks"], **data["methods"]}
    unit = data["yardsticks"]["fp8 e4m3"]["kl"]
    title = f"nats a token from dense prefill, readers of {next(iter(rows.values()))['questions']} questions"
    cells = [_fidelity_row(name, row, unit) for name, row in rows.items()]
    return table_of(title, headings, cells, left={headings[0]})


def _fidelity_row(name: str, row: Row, unit: float) -> list[str]:
    (low, high), ratio, ttft = row["ci95"]["kl"], row["kl"] / unit, row.get("ttft_ms")
    return [
        name,
        f"{row['kl']:.4f}",
        f"{low:.4f}-{high:.4f}",
        f"{ratio:.1f}x" if ratio < 10 else f"{ratio:.0f}x",
        f"{row['top1']:.1%}",
        *("-" if share is None else f"{share:.0%}" for share in (row["same"], row["computed"], row["translated"])),
        "-" if ttft is None else f"{ttft:.0f}",
    ]


def fidelity_notes(data: Row) -> str:
    """Return how to read the table."""
    dense = data["dense"]["ttft_ms"]
    timed = "" if dense is None else f" TTFT: the median of calls served alone; by dense prefill {dense:.0f} ms."
    return (
        "Above: the prompt's KV rounded, nothing else changed; fp8 e4m3 is vLLM's --kv-cache-dtype fp8. Below: "
        f"methods. Answers are forced to those of dense prefill; same: the share of which no token changes.{timed}"
    )


def load(case: str, seconds: float, clients: Mapping[str, Mapping[str, Row]], by: str = "mode") -> Group:
    """Return the table of a case's figures by number of clients and reuse mode, or what else `by` names."""
    rows = [[count, name, *_load_cells(figures)] for count, found in clients.items() for name, figures in found.items()]
    title = f"{case}, {seconds:g} s each; TTFT in ms, runs in s"
    return table_of(title, ("at once", by, *LOAD_COLUMNS, "errors"), rows, left={by})


def _load_cells(figures: Row) -> list[str]:
    shown = ((figures.get(name), form) for name, form in LOAD_COLUMNS.values())
    return [*("-" if figure is None else format(figure, form) for figure, form in shown), str(figures["errors"])]


def vllm_flow(case: Row) -> Iterator[RenderableType]:
    """Yield the table of all engines' figures in a case of workflows."""
    gains = {"kedge": case["speedup"], "stock again": case["control"]}
    headings = ("engine", "s", "times stock", "hits", "waited for", "TTFT p50 ms", "TTFT p90 ms", "tokens per s")
    rows = [_vllm_row(name, row, gains.get(name)) for name, row in case["engines"].items()]
    yield table_of(f"{case['case']}: {case['workload']}", headings, rows, left={"engine"})
    if not case["tokens_identical"]:
        yield "[red]the engines did not give the same tokens[/red]"


def _vllm_row(name: str, row: Row, gain: Row | None) -> list[str]:
    rates = (f"{row[key]:.3f}" for key in ("hit_rate", "waited_rate"))
    times = (f"{row[key]:.1f}" for key in ("ttft_p50_ms", "ttft_p90_ms", "tokens_per_s"))
    return [name, f"{row['seconds']['median']:.2f}", f"{gain['median']:.2f}" if gain else "", *rates, *times]


def vllm_load(seconds: float, models: Mapping[str, Mapping[str, Mapping[str, Row]]]) -> Iterator[RenderableType]:
    """Yield the tables of teams at once."""
    for name, by_clients in models.items():
        yield load(name, seconds, by_clients, "engine")
        for clients, engines in by_clients.items():
            yield f"{clients} at once, times stock in each pair: {engines['kedge']['times_stock']}"


VLLM: Mapping[str, Callable[[Any], Iterator[RenderableType]]] = {"cycle": vllm_flow}
"""Case of `kedge bench vllm` -> what is printed of its figures."""


def sessions(data: Row) -> Iterator[RenderableType]:
    """Yield the tables of every trace: hit rates by capacity."""
    for name, trace in data["traces"].items():
        for live, cells in trace["open"].items():
            yield _open_loop(f"{name}, {live} live", cells, trace["ceiling"][live])


def _open_loop(name: str, cells: Mapping[str, Row], ceiling: float) -> Group:
    title = f"{name}: hit rate by cache over working set; an infinite cache: {ceiling:.3f}"
    columns = list(next(iter(cells.values())))
    rows = [[share, *(f"{row[column]:.3f}" for column in columns)] for share, row in cells.items()]
    return table_of(title, ("cache", *(SESSION_COLUMNS[column] for column in columns)), rows)
