"""The tables of the benchmarks, made of the same data that `--json` writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType

from kedge.cli.output import Columns, Row, cells, table_of

if TYPE_CHECKING:
    from benchmarks.ttft import TtftSettings

MIB = 2**20
WORKFLOW_GAINS = {"lru_device": "times LRU", "lru_host": "times host", "lru_blocking": "times blocking"}
"""Speedup over LRU without a host tier, with one, and with one whose loads block the queue."""
WORKFLOW: Columns = {
    "device hits": ("hit_tokens", ".0f"),
    "host hits": ("host_hit_tokens", ".0f"),
    "MiB loaded": ("mib_h2d", ".0f"),
    "stall s": ("stall_s", ".2f"),
}
"""Tokens found on the device and on the host, MiB loaded, and seconds waited for loads."""
CLOSED: Columns = {
    "hit rate": ("hit", ".3g"),
    "turns per min": ("turns_per_min", ".3g"),
    "TTFT p50 s": ("ttft_p50_s", ".3g"),
    "TTFT p99 s": ("ttft_p99_s", ".3g"),
}
VLLM_SESSIONS: Columns = {
    "turns per min": ("turns_per_min", ".0f"),
    "hits": ("hit", ".3f"),
    "TTFT p50 s": ("ttft_p50_s", ".2f"),
    "TTFT p99 s": ("ttft_p99_s", ".2f"),
}
VLLM_TEAM: Columns = {
    "prompt": ("prompt_tokens", "d"),
    "translated": ("translated_tokens", "d"),
    "dense ms": ("dense_ms", ".1f"),
    "stock ms": ("stock_ms", ".1f"),
    "Kedge ms": ("kedge_ms", ".1f"),
    "times dense": ("speedup_over_dense", ".1f"),
    "times stock": ("speedup_over_stock", ".1f"),
}
TTFT: Columns = {
    "prompt": ("prompt_tokens", "d"),
    "generate ms": ("generate_ms", ".1f"),
    "dense ms": ("dense_ms", ".1f"),
    "Kedge ms": ("translated_ms", ".1f"),
    "times dense": ("speedup", ".1f"),
    "floor ms": ("floor_ms", ".1f"),
    "times floor": ("times_floor", ".1f"),
}
GUARD: Columns = {
    "off after": ("off_after", "d"),
    "lived": ("lived", "d"),
    "final changed": ("changed_served", "d"),
    "far": ("far", ".0%"),
    "KL before": ("kl_before", ".2g"),
    "KL": ("kl", ".2g"),
}
ACCURACY: Columns = {
    "final right": ("right", ".0%"),
    "final same": ("same_final_answer", ".0%"),
    "answers same": ("same_answers", ".0%"),
    "calls translated": ("calls_translated", ".0%"),
    "computed": ("computed", ".0%"),
    "TTFT ms": ("ttft_ms", ".0f"),
}


def sessions_beside(data: Row) -> Iterator[RenderableType]:
    """Yield the tables of the closed loop, where measured, and a line with the costs."""
    for name, trace in data["traces"].items():
        if trace.get("closed"):
            yield _by_live(f"{name}, closed loop", "system", trace["closed"], CLOSED)
    if cost := data.get("cost"):
        per_block = f"{cost['ns_per_block']:.0f} ns per block (LRU: {cost['ns_per_block_lru']:.0f} ns)"
        yield f"cost: {cost['us_per_request']:.0f} us per request, {per_block}"


def vllm_sessions(sessions: Row) -> Iterator[RenderableType]:
    """Yield the table of turns of growing sessions."""
    yield _by_live(f"sessions: room for {sessions['room_tokens']:,} tokens", "engine", sessions["live"], VLLM_SESSIONS)


def _by_live(title: str, who: str, live: Mapping[str, Mapping[str, Row | None]], columns: Columns) -> Group:
    rows = [[count, name, *cells(row or {}, columns)] for count, found in live.items() for name, row in found.items()]
    return table_of(title, ("live", who, *columns), rows, left={who})


def vllm_team(team: Row) -> Iterator[RenderableType]:
    """Yield the table of times of the agents with translated messages."""
    ends = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in team["seconds"].items())
    title = f"team, {team['settings']['samples']} samples; a question end to end: {ends}"
    yield _by_agent(title, team["agents"], VLLM_TEAM)


def ttft(settings: TtftSettings, data: Row) -> Group:
    """Return the table of every agent's times, and how far they are above the floor."""
    title = f"TTFT, {settings.model_size}, {settings.estimator}, {settings.samples} samples, {settings.repeats} repeats"
    return _by_agent(title, data["agents"], TTFT)


def _by_agent(title: str, agents: Sequence[Row], columns: Columns) -> Group:
    rows = [[str(row["agent"] + 1), *cells(row, columns)] for row in agents]
    return table_of(title, ("agent", *columns), rows)


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
    headings = ("policy", "s", *(WORKFLOW_GAINS[base] for base in gained), *WORKFLOW)
    rows = []
    for name, row in case["policies"].items():
        gains = (gained[base].get(name) for base in gained)
        shown = ("" if gain is None else f"{gain['median']:.2f}" for gain in gains)
        counts = cells({**row, "mib_h2d": row["bytes_h2d"] / MIB}, WORKFLOW)
        rows.append([name, f"{row['latency_s']:.2f}", *shown, *counts])
    return table_of(title, headings, rows, left={"policy"})


def guard(faults: Mapping[str, Row]) -> Group:
    """Return the table of injected faults: when they were stopped, and what they change."""
    rows = [[name, row["agent"], *cells(row, GUARD)] for name, row in faults.items()]
    return table_of("calls of the agent until it is off", ("fault", "agent", *GUARD), rows, left={"agent"})


def accuracy(task: str, rows: Sequence[Row]) -> Group:
    """Return the table of all methods."""
    shown = [[row["method"], *cells(row, ACCURACY)] for row in rows]
    return table_of(f"{task}: answers beside those of dense prefill", ("method", *ACCURACY), shown, left={"method"})
