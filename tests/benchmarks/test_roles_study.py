"""A text's KV handed from role to role: a role's own KV changes nothing, the other one's is moved."""

from __future__ import annotations

import pytest

from benchmarks.studies.papers import STUDIES


def test_a_roles_own_kv_changes_nothing_and_the_others_is_moved() -> None:
    pytest.importorskip("llguidance")
    study = STUDIES["roles"]
    rows = study.run(study.settings(quick=True, task="absence", questions=2, taught=0, methods=("kedge", "dense")))
    assert [row["direction"] for row in rows[:4]] == ["host->host", "host->guest", "guest->host", "guest->guest"]
    for row in rows:
        is_control = len(set(row["direction"].split("->"))) == 1
        if row["method"] == "dense":
            assert (row["computed"], row["same_answer"]) == (1, 1)
            assert row["kl"] == pytest.approx(0, abs=1e-9)
        else:
            assert row["computed"] < 0.5
            assert (row["kl"] < 1e-7) is is_control
        assert row["same_answer"] == 1 or not is_control


def test_what_is_served_of_the_others_kv_is_nothing_until_it_is_proved() -> None:
    pytest.importorskip("llguidance")
    study, served = STUDIES["roles"], "served:fidelity=strict"
    rows = study.run(study.settings(quick=True, task="listing", questions=2, taught=0, methods=(served,)))
    moved = [row for row in rows if len(set(row["direction"].split("->"))) > 1]
    assert [row["translated"] for row in moved] == [0, 0]
    assert all(row["same_answer"] == 1 and row["kl"] < 1e-7 for row in rows)
