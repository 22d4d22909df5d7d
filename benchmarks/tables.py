"""The tables of the benchmarks, made of the same data that `--json` writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from kedge.cli.bench_tables import vllm_flow
from kedge.cli.tables import FittingTable

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


def _closed_loop(name: str, live: Mapping[str, Mapping[str, Row]]) -> FittingTable:
    """Return the table of the closed loop, in which a session's next request waits for its answer."""
    rows = [
        [count, system, *(_figure(row[column]) for column in CLOSED_COLUMNS)]
        for count, systems in live.items()
        for system, row in systems.items()
    ]
    headings = ("live", "system", *CLOSED_COLUMNS.values())
    return FittingTable(f"{name}, closed loop", headings, rows, keys=2, left=frozenset({"system"}))


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def vllm_sessions(sessions: Row) -> Iterator[RenderableType]:
    """Yield the table of turns of growing sessions, from `VllmSessionsResult.as_json()`."""
    rows = [_sessions_row(live, name, row) for live, lanes in sessions["live"].items() for name, row in lanes.items()]
    headings = ("live", "engine", "turns per min", "hits", "TTFT p50 s", "TTFT p99 s")
    title = f"sessions: room for {sessions['room_tokens']:,} tokens"
    yield FittingTable(title, headings, rows, keys=2, left=frozenset({"engine"}))


def _sessions_row(live: str, name: str, row: Row | None) -> list[str]:
    if row is None:
        return [live, name, *["-"] * 4]
    times = (f"{row[key]:.2f}" for key in ("ttft_p50_s", "ttft_p99_s"))
    return [live, name, f"{row['turns_per_min']:.0f}", f"{row['hit']:.3f}", *times]


def vllm_accuracy(engines: Mapping[str, Mapping[str, Row]]) -> Iterator[RenderableType]:
    """Yield the table of right answers of every agent, in the order of the team, from `AccuracyResult.as_json()`."""
    rows = [_accuracy_row(engine, task, row) for engine, tasks in engines.items() for task, row in tasks.items()]
    headings = (
        "engine", "team", "right, dense %", "right, translated %", "same final %", "calls translated %", "KL", "95 %",
    )  # fmt: skip
    left = frozenset(headings[:4])
    yield FittingTable("accuracy by agent, and the translated mode's calls", headings, rows, keys=2, left=left)


def _accuracy_row(engine: str, task: str, row: Row) -> list[str]:
    right = (
        " ".join(
            f"{100 * right:.0f}" if right is not None else "-"
            for right in (agent[f"accuracy_{mode}"] for agent in row["agents"])
        )
        for mode in ("dense", "translated")
    )
    shares = (row["same_final_answer"], row["translated_calls"] / row["calls"])
    kl = row.get("kl_until_parting")
    numbers = ("-", "-") if kl is None else (f"{kl:.4f}", "-".join(f"{end:.4f}" for end in row["kl_ci95"]))
    return [engine, task, *right, *(f"{100 * share:.0f}" for share in shares), *numbers]


def vllm_team(team: Row) -> Iterator[RenderableType]:
    """Yield the table of times of the agents with translated messages."""
    ends = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in team["seconds"].items())
    title = f"team, {team['settings']['samples']} samples; a question end to end: {ends}"
    headings = ("agent", "prompt", "translated", "dense ms", "stock ms", "Kedge ms", "times dense", "times stock")
    yield FittingTable(title, headings, [_team_row(row) for row in team["agents"]])


def _team_row(row: Row) -> list[str]:
    times = (f"{row[key]:.1f}" for key in ("dense_ms", "stock_ms", "kedge_ms"))
    gains = (f"{row[key]:.1f}" for key in ("speedup_over_dense", "speedup_over_stock"))
    return [str(row["agent"] + 1), str(row["prompt_tokens"]), str(row["translated_tokens"]), *times, *gains]


VLLM: Mapping[str, Callable[[Any], Iterator[RenderableType]]] = {
    **dict.fromkeys(("no-hints", "no-pressure", "flows", "peer"), vllm_flow),
    "sessions": vllm_sessions,
    "accuracy": vllm_accuracy,
    "team": vllm_team,
}
"""Case of `kedge bench vllm` -> what is printed of its figures."""


def ttft(settings: TtftSettings, data: Row) -> FittingTable:
    """Return the table of every agent's times, and how far they are above the floor."""
    title = f"TTFT, {settings.model_size}, {settings.estimator}, {settings.samples} samples, {settings.repeats} repeats"
    headings = ("agent", "prompt", "generate ms", "dense ms", "Kedge ms", "speed-up", "floor ms", "times floor")
    return FittingTable(title, headings, [_ttft_row(row) for row in data["agents"]])


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


def workflow(case: Row) -> FittingTable:
    """Return the table of all eviction policies' figures in a case, from its `as_json()`."""
    ratio, gained = case["load_ratio_measured"], case["speedups"]
    title = f"{case['case']}; a load costs {ratio} of a prefill" if ratio else case["case"]
    headings = ("policy", "s", *(WORKFLOW_GAINS[base] for base in gained), *WORKFLOW_COUNTS)
    rows = [_workflow_row(name, row, gained) for name, row in case["policies"].items()]
    return FittingTable(title, headings, rows, left=frozenset({"policy"}))


def _workflow_row(name: str, row: Row, gained: Mapping[str, Row]) -> list[str]:
    gains = (gained[base].get(name) for base in gained)
    counts = (f"{row['hit_tokens']:.0f}", f"{row['host_hit_tokens']:.0f}", f"{row['bytes_h2d'] / MIB:.0f}")
    shown = ("" if gain is None else f"{gain['median']:.2f}" for gain in gains)
    return [name, f"{row['latency_s']:.2f}", *shown, *counts, f"{row['stall_s']:.2f}"]


def links(traces: Mapping[str, Row]) -> FittingTable:
    """Return the table of requests that were given to the right session, another's, or one too many."""
    rows = []
    for name, row in traces.items():
        shares = row["right"], row["wrong"], 1 - row["right"] - row["wrong"]
        rows.append([name, f"{row['requests']}", *(f"{100 * share:.1f}" for share in shares)])
    return FittingTable("sessions found without ids", ("trace", "requests", "right %", "wrong %", "not linked %"), rows)


def plain_gain(cases: Mapping[str, Row], agents: Mapping[str, Row]) -> FittingTable:
    """Return the table of workflows: how many times as fast as LRU, with hints and without."""
    rows = [
        [name, f"{row['hinted']:.2f}x", f"{row['plain']:.2f}x", _percent(row["share"]), _found(agents[name])]
        for name, row in cases.items()
    ]
    return FittingTable("workflows over LRU", ("case", "hinted", "plain", "share of gain", "agents found"), rows)


def plain_teams(tasks: Mapping[str, Row], agents: Mapping[str, Row]) -> FittingTable:
    """Return the table of teams as plain chats: translated calls, and right answers."""
    rows = [
        [
            name,
            f"{row['translated_calls_plain']} of {row['calls']}",
            f"{row['translated_calls_hinted']}",
            f"{100 * row['accuracy_plain']:.1f}",
            f"{100 * row['accuracy_dense']:.1f}",
            f"{100 * row['same_final_answer']:.0f} %",
            _found(agents[name]),
        ]
        for name, row in tasks.items()
    ]
    headings = ("team", "translated", "hinted", "right %", "dense %", "same final", "agents found")
    return FittingTable("teams as plain chats", headings, rows)


def plain_sessions(traces: Mapping[str, Row]) -> FittingTable:
    """Return the table of hit rates of sessions with and without ids."""
    lanes = ("stock", "hinted", "plain")
    rows = [[name, *(f"{100 * row[lane]:.1f}" for lane in lanes)] for name, row in traces.items()]
    return FittingTable("tokens of sessions that were cached, in %", ("trace", "LRU", "with ids", "plain"), rows)


def guard(faults: Mapping[str, Row], evidence: Mapping[str, Row]) -> FittingTable:
    """Return the table of injected faults: when they were stopped, and what they change."""
    rows = [
        [
            name,
            evidence[name]["agent"],
            "never" if row["off_after"] is None else str(row["off_after"]),
            str(row["lived"]),
            str(row["changed_served"]),
            "yes" if row["detected"] else "no",
            f"{evidence[name]['far']:.0%}",
            f"{evidence[name]['kl_before']:.2g}",
            f"{evidence[name]['kl']:.2g}",
        ]
        for name, row in faults.items()
    ]
    counts = ("off after", "lived", "final changed", "found", "far")
    headings = ("fault", "agent", *counts, "KL before", "KL")
    return FittingTable("calls of the agent until it is off", headings, rows, left=frozenset({"agent"}))


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _found(agents: Row) -> str:
    return f"{agents['found']} of {agents['true']}"


def study(title: str, rows: Sequence[Row]) -> FittingTable:
    """Return the table of a study's means and spreads; columns without floats identify the row."""
    from benchmarks.studies.study import shown

    cells = shown(rows)
    keys = _key_columns(rows)
    texts = {name.replace("_", " ") for row in rows for name, value in row.items() if isinstance(value, str)}
    return FittingTable(title, list(cells[0]), [list(row.values()) for row in cells], keys, frozenset(texts))


def _key_columns(rows: Sequence[Row]) -> int:
    """Count the columns before the first one with a measurement, which is a float."""
    measured = {name for row in rows for name, value in row.items() if isinstance(value, float)}
    return next((at for at, name in enumerate(rows[0]) if name in measured), 0)
