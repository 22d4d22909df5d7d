"""The pictures of the benchmarks (extra `plot`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kedge.errors import ConfigError

if TYPE_CHECKING:
    from kedge.bench.demo import Comparison


def demo_plot(results: Mapping[str, Comparison], file: Path) -> None:
    """TTFT and accuracy of every agent, dense and by estimator. Raises `ConfigError` without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("plot", str(file), "needs matplotlib: pip install 'kedge[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    dense = next(iter(results.values())).dense
    names = list(dense.agents)
    scores = {"dense": dense, **{name: result.translated for name, result in results.items()}}
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    width = 0.8 / len(scores)
    for i, (name, score) in enumerate(scores.items()):
        places = [x + (i - (len(scores) - 1) / 2) * width for x in range(len(names))]
        agents = [score.agents[agent] for agent in names]
        left.bar(places, [a.ttft_median for a in agents], width, label=name)
        right.bar(places, [100 * a.accuracy for a in agents], width, label=name)
    left.set(title="time to first token (median)", ylabel="ms")
    right.set(title="accuracy", ylabel="%", ylim=(0, 105))
    for axes in (left, right):
        axes.set_xticks(range(len(names)), names)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=len(scores))
    figure.savefig(file, dpi=150)
    plt.close(figure)
