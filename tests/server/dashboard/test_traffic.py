"""The page of plain traffic and its report as JSON."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kedge.engine.echo import EchoEngine
from kedge.engine.local.engine import LocalEngine
from kedge.settings import EngineSettings
from tests.server.conftest import Served, serving

SYSTEM = "You are a careful solver of riddles. Think of every word, and answer in one line only. "


@pytest.fixture(scope="module")
def seen() -> Iterator[Served]:
    with LocalEngine(config=EngineSettings()) as engine, serving(engine) as running:
        client = running.client()
        model = client.models.list().data[0].id
        for number in range(5):
            messages = [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"{number}. What has {number + 7} legs and sleeps? Tell me now."},
            ]
            client.chat.completions.create(model=model, messages=messages, max_tokens=4)  # type: ignore[arg-type]
        yield running


def test_the_page_and_the_report_show_what_was_found(seen: Served) -> None:
    with seen.http() as http:
        report = http.get("/kedge/report").json()
        shown = http.get("/kedge")
    assert (report["mode"], report["requests"], report["known_agents"]) == ("observe", 5, 3)
    (agent,) = report["agents"]
    assert agent["calls"] == 3 and agent["fixed_tokens"] >= 16
    assert shown.headers["content-type"].startswith("text/html") and agent["id"] in shown.text
    assert "riddles" not in shown.text


def test_an_engine_that_looks_at_nothing_has_an_empty_page() -> None:
    with EchoEngine() as engine, serving(engine) as running, running.http() as http:
        assert http.get("/kedge/report").json() is None
        assert "Nothing has been reported" in http.get("/kedge").text
