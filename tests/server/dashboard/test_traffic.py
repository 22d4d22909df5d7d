"""The report of plain traffic, and `kedge inspect --from-traffic` on a server that runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from kedge.cli.main import app
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


def test_the_report_has_what_was_found_and_no_text(seen: Served) -> None:
    with seen.http() as http:
        shown = http.get("/kedge/report")
    report = shown.json()
    assert (report["mode"], report["requests"], report["known_agents"]) == ("observe", 5, 3)
    (agent,) = report["agents"]
    assert agent["calls"] == 3 and agent["fixed_tokens"] >= 16
    assert "riddles" not in shown.text


def test_an_engine_that_looks_at_nothing_has_an_empty_report() -> None:
    with EchoEngine() as engine, serving(engine) as running, running.http() as http:
        assert http.get("/kedge/report").json() is None
        failed = CliRunner().invoke(app, ["inspect", "--from-traffic", running.url])
        assert failed.exit_code == 2 and "nothing to report yet" in " ".join(failed.output.split())


def test_inspect_reads_a_running_server(seen: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = CliRunner().invoke(app, ["inspect", "--from-traffic", seen.url])
    assert done.exit_code == 0, done.output
    assert "plain traffic (observe): 5 requests" in done.stdout and "nothing was found" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("url", ["ftp://nowhere", "http://127.0.0.1:9", "localhost:8000"])
def test_a_server_that_cannot_be_read_is_named(url: str) -> None:
    failed = CliRunner().invoke(app, ["inspect", "--from-traffic", url])
    assert failed.exit_code == 2 and url in failed.output.replace("\n", "")
