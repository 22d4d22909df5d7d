"""The tables of `kedge bench`, made of the same data that `--json` writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kedge.cli.tables import FittingTable

if TYPE_CHECKING:
    from kedge.bench.ttft.matching_cost import MatchingSettings
    from kedge.bench.ttft.measure import TtftSettings
    from kedge.bench.ttft.round import RoundSettings

Row = Mapping[str, Any]
MIB = 2**20
LOAD_COLUMNS = {
    "teams per min": ("teams_per_min", ".1f"),
    "TTFT p50": ("ttft_p50_ms", ".0f"),
    "TTFT p99": ("ttft_p99_ms", ".0f"),
    "run p50": ("latency_p50_s", ".2f"),
    "run p99": ("latency_p99_s", ".2f"),
    "batch mean": ("batch_mean", ".1f"),
    "last third": ("batch_mean_last_third", ".1f"),
    "reused": ("translated_share", ".0%"),
}
"""Heading -> figure and its format."""
WORKFLOW_GAINS = {"lru_device": "times LRU", "lru_host": "times host", "lru_blocking": "times blocking"}
"""Speedup over LRU without a host tier, with one, and with one whose loads block the queue."""
WORKFLOW_COUNTS = ("device hits", "host hits", "MiB loaded", "stall s")
"""Tokens found on the device and on the host, MiB loaded, and seconds waited for loads."""

SESSION_COLUMNS = {
    "lru": "LRU",
    "belady": "Belady",
    "ttl": "TTL",
    "kedge": "Kedge",
    "kedge_ids": "ids given",
    "kedge_perfect": "returns given",
    "kedge_host3": "host x3",
    "kedge_fixed": "fixed given",
}
"""Figure -> heading."""
CLOSED_COLUMNS = {
    "hit": "hit rate",
    "turns_per_min": "turns per min",
    "ttft_p50_s": "TTFT p50 s",
    "ttft_p99_s": "TTFT p99 s",
}
"""Figure -> heading."""

ROUND_PARTS = ("match", "write", "translating", "prefill")
"""What is timed of a round."""


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


def preassembly(settings: TtftSettings, rows: Sequence[Row]) -> FittingTable:
    """Return the TTFT of every agent by what the engine knew before the request."""
    title = f"TTFT in ms, {settings.model_size}; the last column: that of a prompt assembled ahead, in decode steps"
    headings = ("agent", "prompt", "tokens ready", "no hint", "hint at once", "ahead", "decode step", "ahead / step")
    return FittingTable(title, headings, [_preassembly_row(row) for row in rows])


def _preassembly_row(row: Row) -> list[str]:
    counts = (str(row["agent"] + 1), str(row["prompt_tokens"]), str(row["preassembled"]))
    times = (f"{row[f'{name}_ms']:.1f}" for name in ("no_hint", "at_once", "ahead", "step"))
    return [*counts, *times, f"{row['steps']:.2f}"]


def matching_cost(settings: MatchingSettings, results: Mapping[str, Mapping[str, float]]) -> FittingTable:
    """Return the table of milliseconds by estimator."""
    title = f"matching cost, {settings.model_size}, {settings.samples} samples of {settings.tokens} tokens, ms"
    rows = [[name, *(f"{ms:.2f}" for ms in times.values())] for name, times in results.items()]
    headings = ("estimator", "match", "blend", "both", "both, p90")
    return FittingTable(title, headings, rows, left=frozenset({"estimator"}))


def reading_round(settings: RoundSettings, rows: Sequence[Row]) -> FittingTable:
    """Return the table of what several readers of one value take, against one."""
    title = f"{settings.value} tokens read in one round, {settings.model_size}, {settings.estimator}, ms (quartiles)"
    headings = ("readers", "of", "match", "write", "translating", "times one", "prefill", "times one")
    return FittingTable(title, headings, [_round_row(row) for row in rows])


def _round_row(row: Row) -> list[str]:
    match, write, translating, prefill = (f"{row[f'{part}_ms']:.1f}" for part in ROUND_PARTS)
    ratios = (row["times_translating"], row["times_prefill"])
    times = [f"{ratio['median']:.2f} ({ratio['q1']:.2f}-{ratio['q3']:.2f})" for ratio in ratios]
    return [str(row["readers"]), row["of"], match, write, translating, times[0], prefill, times[1]]


def soak(looks: Sequence[Row]) -> FittingTable:
    """Return the table of what is stored, by number of questions."""
    stored = ("anchors", "anchors MiB", "base values", "base MiB", "cached blocks", "leased blocks")
    headings = ("questions", *stored, "peak RSS MiB")
    return FittingTable("what is stored after so many questions", headings, [_soak_row(look) for look in looks])


def _soak_row(look: Row) -> list[str]:
    return [
        f"{look['questions']:,}",
        str(look["anchors"]),
        f"{look['anchor_bytes'] / MIB:.2f}",
        str(look["base_values"]),
        f"{look['base_bytes'] / MIB:.2f}",
        str(look["cached_blocks"]),
        str(look["leased_blocks"]),
        str(look["peak_rss_mb"]),
    ]


def cache(name: str, times: Sequence[Row], growth: Mapping[str, Mapping[str, float]]) -> FittingTable:
    """Return the table of microseconds of every operation by size, with the exponent of their growth.

    `name` is what the sizes count, `times` are `Times.as_json()`, one of each size.
    """
    rows = [_cache_row(operation, times, fit) for operation, fit in growth.items()]
    headings = ("operation", *(f"{one['size']:,}" for one in times), "growth exponent", "times log growth")
    title = f"microseconds by number of {name}; match and insert of 4,096 tokens"
    return FittingTable(title, headings, rows, left=frozenset({"operation"}))


def _cache_row(operation: str, times: Sequence[Row], fit: Mapping[str, float]) -> list[str]:
    cells = (f"{one[operation]:.1f}" for one in times)
    return [operation, *cells, f"{fit['exponent']:.2f}", f"{fit['to_log']:.2f}"]


def load(case: str, seconds: float, clients: Mapping[str, Mapping[str, Row]], by: str = "mode") -> FittingTable:
    """Return the table of a case's figures by number of clients and reuse mode, or what else `by` names."""
    rows = [[count, name, *_load_cells(figures)] for count, found in clients.items() for name, figures in found.items()]
    title = f"{case}, {seconds:g} s each; TTFT in ms, runs in s, batch in requests"
    return FittingTable(title, ("clients", by, *LOAD_COLUMNS, "errors"), rows, keys=2, left=frozenset({by}))


def _load_cells(figures: Row) -> list[str]:
    shown = ((figures[name], form) for name, form in LOAD_COLUMNS.values())
    return [*("-" if figure is None else format(figure, form) for figure, form in shown), str(figures["errors"])]


def vllm_case(case: Row) -> FittingTable:
    """Return the table of all engines' figures in a case, from `Case.as_json()`."""
    gains = {"kedge": case["speedup"], "stock again": case["control"]}
    headings = ("engine", "s", "times stock", "hits", "waited for", "TTFT p50 ms", "TTFT p90 ms", "tokens per s")
    rows = [_vllm_row(name, row, gains.get(name)) for name, row in case["engines"].items()]
    return FittingTable(f"{case['case']}: {case['workload']}", headings, rows, left=frozenset({"engine"}))


def _vllm_row(name: str, row: Row, gain: Row | None) -> list[str]:
    rates = (f"{row[key]:.3f}" for key in ("hit_rate", "waited_rate"))
    times = (f"{row[key]:.1f}" for key in ("ttft_p50_ms", "ttft_p90_ms", "tokens_per_s"))
    return [name, f"{row['seconds']['median']:.2f}", f"{gain['median']:.2f}" if gain else "", *rates, *times]


def vllm_team(team: Row) -> FittingTable:
    """Return the table of times of the agents with translated messages, from `TeamResult.as_json()`."""
    ends = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in team["seconds"].items())
    title = f"team, {team['settings']['samples']} samples; a question end to end: {ends}"
    headings = ("agent", "prompt", "translated", "dense ms", "stock ms", "Kedge ms", "times dense", "times stock")
    return FittingTable(title, headings, [_team_row(row) for row in team["agents"]])


def _team_row(row: Row) -> list[str]:
    times = (f"{row[key]:.1f}" for key in ("dense_ms", "stock_ms", "kedge_ms"))
    gains = (f"{row[key]:.1f}" for key in ("speedup_over_dense", "speedup_over_stock"))
    return [str(row["agent"] + 1), str(row["prompt_tokens"]), str(row["translated_tokens"]), *times, *gains]


def vllm_sessions(sessions: Row) -> FittingTable:
    """Return the table of turns of growing sessions, from `VllmSessionsResult.as_json()`."""
    rows = [_sessions_row(live, name, row) for live, lanes in sessions["live"].items() for name, row in lanes.items()]
    headings = ("live", "engine", "turns per min", "hits", "TTFT p50 s", "TTFT p99 s")
    title = f"sessions: room for {sessions['room_tokens']:,} tokens"
    return FittingTable(title, headings, rows, keys=2, left=frozenset({"engine"}))


def _sessions_row(live: str, name: str, row: Row | None) -> list[str]:
    if row is None:
        return [live, name, *["-"] * 4]
    times = (f"{row[key]:.2f}" for key in ("ttft_p50_s", "ttft_p99_s"))
    return [live, name, f"{row['turns_per_min']:.0f}", f"{row['hit']:.3f}", *times]


def vllm_accuracy(engines: Mapping[str, Mapping[str, Row]]) -> FittingTable:
    """Return the table of right answers of every agent, in the order of the team, from `AccuracyResult.as_json()`."""
    rows = [_accuracy_row(engine, task, row) for engine, tasks in engines.items() for task, row in tasks.items()]
    headings = ("engine", "team", "right, dense %", "right, translated %", "same final %", "calls translated %")
    left = frozenset(headings[:4])
    return FittingTable("accuracy by agent, and the translated mode's calls", headings, rows, keys=2, left=left)


def _accuracy_row(engine: str, task: str, row: Row) -> list[str]:
    right = (
        " ".join(f"{100 * agent[f'accuracy_{mode}']:.0f}" for agent in row["agents"])
        for mode in ("dense", "translated")
    )
    shares = (row["same_final_answer"], row["translated_calls"] / row["calls"])
    return [engine, task, *right, *(f"{100 * share:.0f}" for share in shares)]


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


def sessions(data: Row) -> Iterator[FittingTable]:
    """Yield the tables of every trace: hit rates by capacity, and the closed loop, by live sessions."""
    for name, trace in data["traces"].items():
        for live, cells in trace["open"].items():
            yield _open_loop(f"{name}, {live} live", cells, trace["ceiling"][live])
        if trace["closed"]:
            yield _closed_loop(name, trace["closed"])


def _open_loop(name: str, cells: Mapping[str, Row], ceiling: float) -> FittingTable:
    title = f"{name}: hit rate by cache over working set; an infinite cache: {ceiling:.3f}"
    rows = [[share, *(f"{row[column]:.3f}" for column in SESSION_COLUMNS)] for share, row in cells.items()]
    return FittingTable(title, ("cache", *SESSION_COLUMNS.values()), rows)


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


def session_cost(cost: Row) -> str:
    """Return a line with the costs of caching by session."""
    per_block = f"{cost['ns_per_block']:.0f} ns per block (LRU: {cost['ns_per_block_lru']:.0f} ns)"
    return f"cost: {cost['us_per_request']:.0f} us per request, {per_block}"


def links(traces: Mapping[str, Row]) -> FittingTable:
    """Return the table of requests that were given to the right session, another's, or one too many."""
    rows = [
        [name, f"{row['requests']}", *(f"{100 * share:.1f}" for share in _shares_of_links(row))]
        for name, row in traces.items()
    ]
    headings = ("trace", "requests", "right %", "wrong %", "not linked %")
    return FittingTable("sessions found without ids", headings, rows)


def _shares_of_links(row: Row) -> tuple[float, float, float]:
    return row["right"], row["wrong"], 1 - row["right"] - row["wrong"]


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


def plain_graphs(tasks: Mapping[str, Row]) -> FittingTable:
    """Return the table of LangGraph applications: what was not computed, and what was translated."""
    rows = [
        [
            name,
            lane,
            f"{100 * score['reused']:.1f}",
            f"{score['translated_calls']} of {score['calls']}",
            f"{100 * score['accuracy']:.1f}",
        ]
        for name, lanes in tasks.items()
        for lane, score in lanes.items()
    ]
    headings = ("team", "client", "reused %", "translated calls", "right %")
    return FittingTable("teams on LangGraph", headings, rows, keys=2, left=frozenset({"client"}))


def guard(faults: Mapping[str, Row], evidence: Mapping[str, Row]) -> FittingTable:
    """Return the table of injected faults: when they were stopped, and what they change."""
    rows = [
        [
            name,
            evidence[name]["agent"],
            "never" if row["off_after"] is None else str(row["off_after"]),
            str(row["changed_served"]),
            str(row["changed_unguarded"]),
            "yes" if row["detected"] else "no",
            f"{evidence[name]['changed_calls']:.0%}",
            f"{evidence[name]['kl_before']:.2g}",
            f"{evidence[name]['kl']:.2g}",
            f"{evidence[name]['kl_unguarded']:.2g}",
        ]
        for name, row in faults.items()
    ]
    counts = ("off after", "final changed", "unguarded", "found", "calls changed")
    headings = ("fault", "agent", *counts, "KL before", "KL", "KL unguarded")
    return FittingTable("calls of the agent until it is off", headings, rows, left=frozenset({"agent"}))


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _found(agents: Row) -> str:
    return f"{agents['found']} of {agents['true']}"


def study(title: str, rows: Sequence[Row]) -> FittingTable:
    """Return the table of a study's means and spreads; columns without floats identify the row."""
    from kedge.bench.lab.studies.report import shown

    cells = shown(rows)
    keys = _key_columns(rows)
    texts = {name.replace("_", " ") for row in rows for name, value in row.items() if isinstance(value, str)}
    return FittingTable(title, list(cells[0]), [list(row.values()) for row in cells], keys, frozenset(texts))


def _key_columns(rows: Sequence[Row]) -> int:
    """Count the columns before the first one with a measurement, which is a float."""
    measured = {name for row in rows for name, value in row.items() if isinstance(value, float)}
    return next((at for at, name in enumerate(rows[0]) if name in measured), 0)
