"""The pictures of studies: what is drawn of their rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib import pyplot

from benchmarks.plots import study_plot
from benchmarks.studies.study import Plot


def test_a_single_point_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"method": "swept", "computed": 0.2, "kl": 1e-4, "judge": 1e-12},
        {"method": "swept", "computed": 0.7, "kl": 1e-5, "judge": 1.0},
        {"method": "alone", "computed": 0.3, "kl": 1e-6, "judge": 0.5},
    ]
    monkeypatch.setattr(pyplot, "close", lambda _: None)
    file = tmp_path / "figure.png"
    study_plot(Plot("computed", ("kl", "judge"), "method", "lines"), rows, "figure", file)
    drawn = {
        axes.get_title(): {line.get_label(): (list(line.get_ydata()), line.get_markersize()) for line in axes.lines}
        for axes in pyplot.gcf().axes
    }
    monkeypatch.undo()
    pyplot.close("all")
    assert drawn == {
        "kl": {"swept": ([1e-4, 1e-5], 3), "alone": ([1e-6], 7)},
        "judge": {"swept": ([1e-12, 1.0], 3), "alone": ([0.5], 7)},
    }
    assert file.read_bytes()[:4] == b"\x89PNG"
