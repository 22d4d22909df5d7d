"""How a server ends, by itself or with its engine: what may finish, what does not is told, nothing new is taken."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from kedge.engine.base import Engine
from kedge.engine.echo import EchoEngine
from kedge.server import app
from kedge.server.service import Service
from kedge.server.tenancy import KeyRing
from kedge.settings import ServerSettings
from tests.server.conftest import FLOW, PATIENCE, YAML, serving, wait_until

BOOM = RuntimeError("boom")
LONG = {"prompt": "x", "max_tokens": 6000, "ignore_eos": True}


class Ending:
    """A server that can be told to end, as SIGTERM tells it."""

    def __init__(
        self,
        engine: Engine,
        grace: float = 1.0,
        on_failure: Callable[[], None] | None = None,
        keys: KeyRing | None = None,
        key: str = "",
    ) -> None:
        application = app.create_app(engine, ServerSettings(grace=grace), keys)
        self.service: Service = application.state.service
        self.server = app.GracefulServer(application, on_failure, port=0, log_level="warning")
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        wait_until(lambda: self.server.started)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.key = key
        self.http = self.client()

    def client(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", headers=headers, timeout=PATIENCE)

    def end(self) -> None:
        self.server.handle_exit(15, None)

    def joined(self) -> bool:
        self.thread.join(PATIENCE)
        return not self.thread.is_alive()


@contextmanager
def ending(grace: float, delay_s: float) -> Iterator[Ending]:
    with EchoEngine(delay_s=delay_s) as engine:
        running = Ending(engine, grace)
        yield running
        running.end()
        assert running.joined()
        assert not engine.in_flight
        assert running.service.is_quiet


def test_a_stream_that_ends_in_time_is_whole() -> None:
    with (
        ending(grace=5, delay_s=0.005) as running,
        running.http.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 100, "stream": True}) as answer,
    ):
        events = [line for line in first_then(running.end, answer) if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert sum(len(json.loads(line[6:])["choices"][0]["text"]) for line in events[:-1]) == 50, "x and EOS by turns"


def first_then(act: Callable[[], None], answer: httpx.Response) -> Iterator[str]:
    """The lines of a stream, of which the first is followed by an act."""
    for number, line in enumerate(answer.iter_lines()):
        if number == 0:
            act()
        yield line


def test_a_stream_that_goes_on_too_long_is_told_so() -> None:
    with (
        ending(grace=0.2, delay_s=0.01) as running,
        running.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer,
    ):
        events = [line for line in first_then(running.end, answer) if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2][6:])["error"]["code"] == "engine_closed"


def test_an_answer_that_goes_on_too_long_is_a_503() -> None:
    with ending(grace=0.2, delay_s=0.01) as running:
        answers: list[httpx.Response] = []
        caller = threading.Thread(target=lambda: answers.append(running.http.post("/v1/completions", json=LONG)))
        caller.start()
        wait_until(lambda: not running.service.is_quiet)
        running.end()
        caller.join(PATIENCE)
        assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "engine_closed")
        assert answers[0].headers["retry-after"] == "1"


def test_a_run_without_a_listener_has_the_grace_too() -> None:
    with ending(grace=5, delay_s=0.005) as running:
        running.http.post("/v1/workflows", content=FLOW, headers=YAML)
        run = running.http.post("/v1/workflows/pair/runs", json={"inputs": {"user_question": "x" * 20}}).json()["id"]
        running.end()
        assert running.joined()
        (mine,) = running.server._runs._of.values()
        assert mine[run].status == "finished"


def test_new_calls_are_told_while_the_server_drains() -> None:
    body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with (
        ending(grace=30, delay_s=0.01) as running,
        running.client() as other,
        running.http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        running.end()
        wait_until(lambda: running.service.is_ending)
        assert (other.get("/ready").status_code, other.get("/health").status_code) == (503, 200)
        refused = other.post("/v1/completions", json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert list(lines)[-2:] == ["data: [DONE]", ""]


def test_an_idle_server_ends_at_once() -> None:
    with ending(grace=1000 * PATIENCE, delay_s=0) as running:
        running.end()
        assert running.joined()


def test_an_engine_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MARGIN_SECONDS", 1)
    told, over = threading.Event(), threading.Event()
    with EchoEngine() as engine:
        monkeypatch.setattr(engine, "cancel", lambda _: over.wait())
        running = Ending(engine, grace=0, on_failure=told.set)
        running.end()
        assert told.wait(PATIENCE) and running.joined()
        over.set()


# an engine that ends by itself ----------------------------------------------------------------------------------------


@contextmanager
def failing() -> Iterator[tuple[Ending, EchoEngine]]:
    """A server that ends because its engine does, within the block: there is a minute's grace that it must not take."""
    with EchoEngine(delay_s=0.01) as engine:
        running = Ending(engine, grace=60.0)
        yield running, engine
        assert running.joined()
        assert not engine.in_flight
        assert running.service.is_quiet


def test_health_tells_an_engine_that_ended_by_itself_from_one_that_works() -> None:
    with EchoEngine() as engine, serving(engine) as running, running.http() as http:
        assert [http.get(path).status_code for path in ("/health", "/ready")] == [200, 200]
        engine.fail(BOOM)
        assert [http.get(path).status_code for path in ("/health", "/ready")] == [503, 503]
        error = http.get("/health").json()["error"]
    assert error["code"] == "engine_closed" and "boom" in error["message"]


def test_a_server_whose_engine_fails_ends_and_its_streams_are_told() -> None:
    with (
        failing() as (running, engine),
        running.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer,
    ):
        events = [line for line in first_then(lambda: engine.fail(BOOM), answer) if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2][6:])["error"]["code"] == "engine_closed"


@pytest.mark.parametrize("stream", [False, True])
def test_a_run_that_an_engine_takes_with_it_has_failed(stream: bool) -> None:
    with failing() as (running, engine):
        running.http.post("/v1/workflows", content=FLOW, headers=YAML).raise_for_status()
        body = {"inputs": {"user_question": "x" * 2000}, "stream": stream}
        caller = threading.Thread(target=running.http.post, args=("/v1/workflows/pair/runs",), kwargs={"json": body})
        caller.start()
        wait_until(lambda: bool(engine.in_flight))
        engine.fail(BOOM)
        caller.join(PATIENCE)
    (run,) = next(iter(running.server._runs._of.values())).values()
    assert run.status == "failed"
    assert run.events[-1][1]["error"]["code"] == "engine_closed"
    assert "boom" in run.events[-1][1]["error"]["message"]
