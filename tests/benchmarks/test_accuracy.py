"""`kedge bench accuracy` in the small, on the bundled model."""

from pathlib import Path

import pytest

from benchmarks.accuracy import AccuracySettings, measure
from kedge.errors import ConfigError
from tests.cli.commands import measured

NANO = Path("nano")


def test_dense_prefill_is_the_ceiling_and_methods_compute_less() -> None:
    rows = measure(AccuracySettings(NANO, "math", 3, 6, ("exact", "kedge", "token", "served:fidelity=strict")))
    by_name = {row["method"]: row for row in rows}
    dense, exact, moved = (by_name[name] for name in ("dense", "exact", "kedge"))
    assert (dense["right"], dense["same_final_answer"], dense["computed"], dense["calls_translated"]) == (1, 1, 1, 0)
    assert 1 > exact["computed"] > moved["computed"] > 0 and exact["same_answers"] == 1
    assert moved["calls_translated"] > 0.5 > by_name["served:fidelity=strict"]["calls_translated"]
    assert all(row["ttft_ms"] > 0 for row in rows)


@pytest.mark.parametrize("agents", [1, 6])
def test_a_number_of_agents_that_a_team_does_not_have_is_refused(agents: int) -> None:
    with pytest.raises(ConfigError, match="agents"):
        measure(AccuracySettings(NANO, "math", agents, 1))


def test_the_command_writes_what_it_shows(tmp_path: Path) -> None:
    command = ["bench", "accuracy", "--model", "nano", "--task", "reading", "--questions", "1"]
    saved, shown = measured(tmp_path, *command, "--methods", "exact,kvcomm")
    rows = saved["rows"]
    assert [row["method"] for row in rows] == ["dense", "exact", "kvcomm"]
    assert all(row["method"] in shown for row in rows)
