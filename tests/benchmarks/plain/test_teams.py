"""A team as plain chats over HTTP is translated, and answers as by dense prefill."""

from __future__ import annotations

from benchmarks.plain.measure import PlainTeamSettings, measure_teams


def test_a_team_of_plain_chats_is_found_and_translated() -> None:
    (found,) = measure_teams(PlainTeamSettings(questions=9, tasks=("math",)), lambda _: None).values()
    figures = found.as_json()
    assert found.agents == (5, 5) and figures["calls"] == 45
    assert 0 < figures["translated_calls_plain"] <= figures["translated_calls_hinted"]
    assert figures["accuracy_plain"] == figures["accuracy_dense"] == 1.0
    assert figures["same_final_answer"] == 1.0
