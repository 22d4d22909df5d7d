"""`kedge bench`: every measurement has a quick form, and whatever else is given wins over it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from kedge.bench.lab.studies import catalog
from kedge.bench.ttft.measure import QUICK, TtftSettings
from kedge.cli.bench import _ttft_settings, bench
from kedge.cli.main import app

MEASUREMENTS = typer.main.get_command(bench).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_every_measurement_has_a_quick_form(name: str) -> None:
    assert any("--quick" in parameter.opts for parameter in MEASUREMENTS[name].params)


def test_what_is_given_wins_over_quick() -> None:
    assert _ttft_settings(True, "tiny", None, question=50, samples=None) == replace(
        QUICK, model_size="tiny", question=50
    )
    assert _ttft_settings(False, "32m", "cpu") == TtftSettings(device="cpu")


def test_all_writes_nothing_unless_it_is_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = replace(catalog.STUDIES["memory"], measure=lambda *_: [{"anchors": 5, "mib": 1.25}])
    monkeypatch.setattr(catalog, "STUDIES", {"memory": study})
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["bench", "all", "--quick"])
    assert done.exit_code == 0, done.output
    assert "1.25" in done.output
    assert list(tmp_path.iterdir()) == []
    assert CliRunner().invoke(app, ["bench", "all", "--quick", "--resume"]).exit_code == 2
