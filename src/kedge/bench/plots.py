"""The pictures of the benchmarks (extra `plot`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedge.errors import ConfigError

if TYPE_CHECKING:
    from kedge.bench.demo import Comparison


def demo_plot(results: Mapping[str, Comparison], file: Path) -> None:
    """TTFT and accuracy of every agent, dense and by estimator. Raises `ConfigError` without matplotlib."""
    plt = _pyplot(file)
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


def workflow_plot(cases: Mapping[str, Mapping[str, Mapping[str, Any]]], file: Path) -> None:
    """Speed-up of every policy over LRU on the device, case by case, with the least and the greatest trial as whiskers.

    `cases`: case -> baseline -> policy -> {median, min, max}. Raises `ConfigError` without matplotlib.
    """
    plt = _pyplot(file)
    figure, axes = plt.subplots(figsize=(2 + 3.2 * len(cases), 4), layout="constrained")
    policies = list(next(iter(cases.values()))["lru_device"])
    width = 0.8 / len(policies)
    for i, policy in enumerate(policies):
        gains = [gains["lru_device"][policy] for gains in cases.values()]
        places = [x + (i - (len(policies) - 1) / 2) * width for x in range(len(cases))]
        whiskers = [
            [gain["median"] - gain["min"] for gain in gains],
            [gain["max"] - gain["median"] for gain in gains],
        ]
        axes.bar(places, [gain["median"] for gain in gains], width, label=policy, yerr=whiskers, ecolor="grey")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(title="speed-up over LRU without a host tier", ylabel="times")
    axes.set_xticks(range(len(cases)), list(cases))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _pyplot(file: Path) -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("plot", str(file), "needs matplotlib: pip install 'kedge[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
