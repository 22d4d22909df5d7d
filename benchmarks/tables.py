"""The tables of the benchmarks, made of the same data that `--json` writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from kedge.cli.bench_tables import vllm_flow
from kedge.cli.tables import table_of

if TYPE_CHECKING:
    from benchmarks.ttft import TtftSettings

Row = Mapping[str, Any]
MIB = 2**20
WORKFLOW_GAINS = {"lru_device": "times LRU", "lru_host": "times host", "lru_blocking": "times blocking"}
"""Speedup over LRU without a host tier, with one, and with one whose loads block the queue."""
WORKFLOW_COUNTS = ("device hits", "host hits", "MiB loaded", "stall s")
"""Tokens found on the device and on the host, MiB loaded, and seconds waited for loads."""


CLOSED_COLUMNS = {
    "hit": "hit rate",
    "turns_per_min": "turns per min",
    "ttft_p50_s": "TTFT p50 s",
    "ttft_p99_s": "TTFT p99 s",
}
"""Figure -> heading."""


def sessions_beside(data: Row) -> Iterator[RenderableType]:
    """Yield the tables of the closed loop, where measured, and a line with the costs."""
    for name, trace in data["traces"].items():
        if trace.get("closed"):
            yield _closed_loop(name, trace["closed"])
    if cost := data.get("cost"):
        per_block = f"{cost['ns_per_block']:.0f} ns per block (LRU: {cost['ns_per_block_lru']:.0f} ns)"
        yield f"cost: {cost['us_per_request']:.0f} us per request, {per_block}"


def _closed_loop(name: str, live: Mapping[str, Mapping[str, Row]]) -> Group:
    """Return the table of the closed loop, in which a session's next request waits for its answer."""
    rows = [
        [count, system, *(_figure(row[column]) for column in CLOSED_COLUMNS)]
        for count, systems in live.items()
        for system, row in systems.items()
    ]
    headings = ("live", "system", *CLOSED_COLUMNS.values())
    return table_of(f"{name}, closed loop", headings, rows, left={"system"})


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def vllm_sessions(sessions: Row) -> Iterator[RenderableType]:
    """Yield the table of turns of growing sessions, from `VllmSessionsResult.as_json()`."""
    rows = [_sessions_row(live, name, row) for live, lanes in sessions["live"].items() for name, row in lanes.items()]
    headings = ("live", "engine", "turns per min", "hits", "TTFT p50 s", "TTFT p99 s")
    title = f"sessions: room for {sessions['room_tokens']:,} tokens"
    yield table_of(title, headings, rows, left={"engine"})


def _sessions_row(live: str, name: str, row: Row | None) -> list[str]:
    if row is None:
        return [live, name, *["-"] * 4]
    times = (f"{row[key]:.2f}" for key in ("ttft_p50_s", "ttft_p99_s"))
    return [live, name, f"{row['turns_per_min']:.0f}", f"{row['hit']:.3f}", *times]


def vllm_team(team: Row) -> Iterator[RenderableType]:
    """Yield the table of times of the agents with translated messages."""
    ends = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in team["seconds"].items())
    title = f"team, {team['settings']['samples']} samples; a question end to end: {ends}"
    headings = ("agent", "prompt", "translated", "dense ms", "stock ms", "Kedge ms", "times dense", "times stock")
    yield table_of(title, headings, [_team_row(row) for row in team["agents"]])


def _team_row(row: Row) -> list[str]:
    times = (f"{row[key]:.1f}" for key in ("dense_ms", "stock_ms", "kedge_ms"))
    gains = (f"{row[key]:.1f}" for key in ("speedup_over_dense", "speedup_over_stock"))
    return [str(row["agent"] + 1), str(row["prompt_tokens"]), str(row["translated_tokens"]), *times, *gains]


VLLM: Mapping[str, Callable[[Any], Iterator[RenderableType]]] = {
    **dict.fromkeys(("no-hints", "no-pressure", "flows", "peer"), vllm_flow),
    "sessions": vllm_sessions,
    "team": vllm_team,
}
"""Case of `kedge bench vllm` -> what is printed of its figures."""


def ttft(settings: TtftSettings, data: Row) -> Group:
    """Return the table of every agent's times, and how far they are above the floor."""
    title = f"TTFT, {settings.model_size}, {settings.estimator}, {settings.samples} samples, {settings.repeats} repeats"
    headings = ("agent", "prompt", "generate ms", "dense ms", "Kedge ms", "speed-up", "floor ms", "times floor")
    return table_of(title, headings, [_ttft_row(row) for row in data["agents"]])


def _ttft_row(row: Row) -> list[str]:
    times = (f"{row[name]:.1f}" for name in ("generate_ms", "dense_ms", "translated_ms"))
    floor = ("", "") if row["floor_ms"] is None else (f"{row['floor_ms']:.1f}", f"{row['times_floor']:.1f}")
    return [str(row["agent"] + 1), str(row["prompt_tokens"]), *times, f"{row['speedup']:.1f}x", *floor]


def ttft_parts(data: Row) -> Iterator[str]:
    """Yield a line per agent with the parts of Kedge's time that take at least a millisecond."""
    for row in data["agents"]:
        parts = ", ".join(f"{name} {ms:.1f} ms" for name, ms in row["parts_ms"].items() if ms >= 1)
        if parts:
            yield f"agent {row['agent'] + 1}: {parts}"


def workflow(case: Row) -> Group:
    """Return the table of all eviction policies' figures in a case, from its `as_json()`."""
    ratio, gained = case["load_ratio_measured"], case["speedups"]
    title = f"{case['case']}; a load costs {ratio} of a prefill" if ratio else case["case"]
    headings = ("policy", "s", *(WORKFLOW_GAINS[base] for base in gained), *WORKFLOW_COUNTS)
    rows = [_workflow_row(name, row, gained) for name, row in case["policies"].items()]
    return table_of(title, headings, rows, left={"policy"})


def _workflow_row(name: str, row: Row, gained: Mapping[str, Row]) -> list[str]:
    gains = (gained[base].get(name) for base in gained)
    counts = (f"{row['hit_tokens']:.0f}", f"{row['host_hit_tokens']:.0f}", f"{row['bytes_h2d'] / MIB:.0f}")
    shown = ("" if gain is None else f"{gain['median']:.2f}" for gain in gains)
    return [name, f"{row['latency_s']:.2f}", *shown, *counts, f"{row['stall_s']:.2f}"]


def guard(faults: Mapping[str, Row]) -> Group:
    """Return the table of injected faults: when they were stopped, and what they change."""
    rows = [
        [
            name,
            row["agent"],
            "never" if row["off_after"] is None else str(row["off_after"]),
            str(row["lived"]),
            str(row["changed_served"]),
            f"{row['far']:.0%}",
            f"{row['kl_before']:.2g}",
            f"{row['kl']:.2g}",
        ]
        for name, row in faults.items()
    ]
    headings = ("fault", "agent", "off after", "lived", "final changed", "far", "KL before", "KL")
    return table_of("calls of the agent until it is off", headings, rows, left={"agent"})


def accuracy(task: str, rows: Sequence[Row]) -> Group:
    """Return the table of all methods."""
    shares = ("right", "same_final_answer", "same_answers", "calls_translated", "computed")
    headings = ("method", "final right", "final same", "answers same", "calls translated", "computed", "TTFT ms")
    cells = [
        [row["method"], *("-" if row[name] is None else f"{row[name]:.0%}" for name in shares), f"{row['ttft_ms']:.0f}"]
        for row in rows
    ]
    return table_of(f"{task}: answers beside those of dense prefill", headings, cells, left={"method"})
