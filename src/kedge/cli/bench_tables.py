"""The tables of `kedge bench`, made of the same data that `--json` writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kedge.cli.tables import FittingTable

if TYPE_CHECKING:
    from kedge.bench.ttft.matching_cost import MatchingSettings
    from kedge.bench.ttft.measure import TtftSettings

Row = Mapping[str, Any]
MIB = 2**20


def ttft(settings: TtftSettings, data: Row) -> FittingTable:
    """Return the times of every agent, and how far they are above the floor."""
    title = f"TTFT, {settings.model_size}, {settings.estimator}, {settings.samples} samples, {settings.repeats} repeats"
    headings = ("agent", "prompt", "generate ms", "dense ms", "Kedge ms", "speed-up", "floor ms", "times floor")
    return FittingTable(title, headings, [_ttft_row(row) for row in data["agents"]])


def _ttft_row(row: Row) -> list[str]:
    times = (f"{row[name]:.1f}" for name in ("generate_ms", "dense_ms", "translated_ms"))
    floor = ("", "") if row["floor_ms"] is None else (f"{row['floor_ms']:.1f}", f"{row['times_floor']:.1f}")
    return [str(row["agent"] + 1), str(row["prompt_tokens"]), *times, f"{row['speedup']:.1f}x", *floor]


def ttft_parts(data: Row) -> Iterator[str]:
    """Yield a line for every agent with the parts of Kedge's time that take a millisecond and more."""
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
    """Return the milliseconds of every estimator."""
    title = f"matching cost, {settings.model_size}, {settings.samples} samples of {settings.tokens} tokens, ms"
    rows = [[name, *(f"{ms:.2f}" for ms in times.values())] for name, times in results.items()]
    headings = ("estimator", "match", "blend", "both", "both, p90")
    return FittingTable(title, headings, rows, left=frozenset({"estimator"}))


def soak(looks: Sequence[Row]) -> FittingTable:
    """Return what is stored after more and more questions."""
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
    """Return the microseconds of every operation by size, with the exponent of their growth.

    `name` is what the sizes count, `times` are `Times.as_json()`, one of each size.
    """
    rows = [_cache_row(operation, times, fit) for operation, fit in growth.items()]
    headings = ("operation", *(f"{one['size']:,}" for one in times), "growth exponent", "times log growth")
    title = f"microseconds by number of {name}; match and insert of 4,096 tokens"
    return FittingTable(title, headings, rows, left=frozenset({"operation"}))


def _cache_row(operation: str, times: Sequence[Row], fit: Mapping[str, float]) -> list[str]:
    cells = (f"{one[operation]:.1f}" for one in times)
    return [operation, *cells, f"{fit['exponent']:.2f}", f"{fit['to_log']:.2f}"]
