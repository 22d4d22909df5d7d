"""Pictures of studies and of workflows (extra `plot`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.studies.study import Plot, Row

STYLES = ("-", "--", ":")
"""matplotlib repeats its colours, so further lines get another style."""


def pyplot() -> Any:
    """Return matplotlib's `pyplot`, which draws to files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as drawing

    return drawing


def workflow_plot(cases: Mapping[str, Mapping[str, Mapping[str, Any]]], file: Path) -> None:
    """Draw every policy's speed-up over LRU without a host tier, with minimum and maximum as whiskers.

    `cases`: case -> baseline -> policy -> {median, min, max}.
    """
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(2 + 3.2 * len(cases), 4), layout="constrained")
    policies = list(next(iter(cases.values()))["lru_device"])
    width = 0.8 / len(policies)
    for i, policy in enumerate(policies):
        gains = [gains["lru_device"][policy] for gains in cases.values()]
        places = [x + (i - (len(policies) - 1) / 2) * width for x in range(len(cases))]
        whiskers = [[abs(gain["median"] - gain[end]) for gain in gains] for end in ("min", "max")]
        axes.bar(places, [gain["median"] for gain in gains], width, label=policy, yerr=whiskers, ecolor="grey")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(title="speed-up over LRU without a host tier", ylabel="times")
    axes.set_xticks(range(len(cases)), list(cases))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def study_plot(plot: Plot, rows: Sequence[Row], title: str, file: Path) -> None:
    """Draw a study's figure, one panel for each of `plot.ys`."""
    plt = pyplot()
    parts = _parts(plot, rows)
    panels = [(part, y) for part in parts for y in plot.ys]
    across = len(plot.ys) if plot.of else min(len(plot.ys), 2)
    down = -(-len(panels) // across)
    figure, grid = plt.subplots(down, across, figsize=(5.5 * across, 3.4 * down), layout="constrained", squeeze=False)
    for axes, (part, y) in zip(grid.flat, panels, strict=False):
        _panel(axes, plot, parts[part], y)
        if part:
            axes.set(title=f"{part}: {axes.get_title()}")
    for axes in list(grid.flat)[len(panels) :]:
        axes.axis("off")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    if plot.by:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5))
    figure.suptitle(title)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _parts(plot: Plot, rows: Sequence[Row]) -> dict[str, Sequence[Row]]:
    """Return the rows of each value of `plot.of`; without that all of them, with no name."""
    if plot.of is None:
        return {"": rows}
    column = plot.of
    return {name: [row for row in rows if row[column] == name] for name in dict.fromkeys(row[column] for row in rows)}


def _panel(axes: Any, plot: Plot, rows: Sequence[Row], y: str) -> None:
    xs = list(dict.fromkeys(row[plot.x] for row in rows))
    groups = list(dict.fromkeys(row[plot.by] if plot.by else "" for row in rows))
    width = 0.8 / len(groups)
    for i, group in enumerate(groups):
        shown = [row for row in rows if row.get(y) is not None and (not plot.by or row[plot.by] == group)]
        points = [row[plot.x] for row in shown], [row[y] for row in shown]
        if plot.kind == "lines":
            style, size = STYLES[i // _COLOURS % len(STYLES)], 3 if len(set(points[0])) > 1 else 7
            axes.plot(*_means(*points), style, marker="o", markersize=size, label=group)
            continue
        places = [xs.index(x) + (i - (len(groups) - 1) / 2) * width for x in points[0]]
        whiskers = [row.get(f"{y}_sd") or 0 for row in shown]
        axes.bar(places, points[1], width, label=group, yerr=whiskers if any(whiskers) else None, ecolor="grey")
    if plot.kind == "bars":
        axes.set_xticks(range(len(xs)), [str(x) for x in xs], rotation=30, ha="right")
    axes.set(title=y.replace("_", " "), xlabel=plot.x.replace("_", " "))
    axes.spines[["top", "right"]].set_visible(False)


_COLOURS = 10
"""Lines after which matplotlib repeats its colours."""


def _means(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return one point per x: the mean of its ys."""
    places = list(dict.fromkeys(xs))
    return places, [fmean(y for x, y in zip(xs, ys, strict=True) if x == place) for place in places]
