"""Pictures of results (extra `plot`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kedge.errors import ConfigError

STYLES = ("-", "--", ":")
"""matplotlib repeats its colours, so further lines get another style."""


def sessions_plot(traces: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """Draw hit rates by capacity, one row of panels for each trace, one panel for each number of live sessions.

    `traces`: name -> {"open": live sessions -> capacity -> column -> rate}. Raises `ConfigError` without matplotlib.
    """
    plt = pyplot(file)
    across = max(len(trace["open"]) for trace in traces.values())
    figure, grid = plt.subplots(
        len(traces), across, figsize=(2 + 3.6 * across, 1.5 + 3 * len(traces)), layout="constrained", squeeze=False
    )
    for row, (name, trace) in zip(grid, traces.items(), strict=True):
        for axes in row[len(trace["open"]) :]:
            axes.axis("off")
        for axes, (live, cells) in zip(row, trace["open"].items(), strict=False):
            for at, column in enumerate(next(iter(cells.values()))):
                rates = [cell[column] for cell in cells.values()]
                shares = [float(capacity) for capacity in cells]
                axes.plot(shares, rates, STYLES[at % len(STYLES)], marker="o", markersize=3, label=column)
            axes.set(title=f"{name}, {live} live", xlabel="cache over working set", ylabel="hit rate", ylim=(0, 1))
            axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=min(8, 1 + 2 * across))
    figure.savefig(file, dpi=110)
    plt.close(figure)


def pyplot(file: Path) -> Any:
    """Return matplotlib's `pyplot`, which draws to files. Raises `ConfigError` without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("plot", str(file), "needs matplotlib: pip install 'kedge[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as drawing

    return drawing
