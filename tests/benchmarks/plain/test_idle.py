"""The figures of an idle plug-in's cost."""

from __future__ import annotations

from benchmarks.plain.measure import IdleResult


def test_the_share_is_the_median_of_starts_so_that_one_lucky_process_does_not_count_for_all_its_batches() -> None:
    idle = IdleResult(((0.5, 1.0, 0.75), (1.0, 1.0, 1.0), (0.9, 0.8, 0.7), (2.0, 2.0, 2.0)))
    assert idle.medians == [0.75, 1.0, 0.8, 2.0]
    assert idle.as_json() == {"idle_share": 0.9, "idle_quartiles": [0.7875, 1.25], "idle_starts": 4}
