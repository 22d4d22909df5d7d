"""A team on LangGraph whose code knows nothing of Kedge is translated, and with the adapter's hints no less."""

from __future__ import annotations

import pytest

from benchmarks.plain.teams import PlainTeamSettings

pytest.importorskip("langchain_openai", reason="LangGraph's client is not installed")


def test_an_unchanged_graph_is_translated_and_answers_as_without() -> None:
    from benchmarks.plain.teams import ADAPTER, PLAIN, STOCK, measure_langgraph

    lanes = measure_langgraph(PlainTeamSettings(questions=9, tasks=("math",)), lambda _: None)["math"]
    figures = {lane: score.as_json() for lane, score in lanes.items()}
    assert {one["calls"] for one in figures.values()} == {45}
    assert figures[ADAPTER]["translated_calls"] >= figures[PLAIN]["translated_calls"] > 0
    assert figures[STOCK]["translated_calls"] == 0
    assert figures[ADAPTER]["reused"] >= figures[PLAIN]["reused"] > figures[STOCK]["reused"] > 0
    assert {one["accuracy"] for one in figures.values()} == {1.0}
