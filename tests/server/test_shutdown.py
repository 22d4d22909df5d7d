"""How a server ends, by itself or with its engine: what may finish, what does not is told, nothing new is taken."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import httpx
import pytest

from kedge.engine.echo import EchoEngine
from kedge.server import app
from kedge.server.workflows import ServerRun
from kedge.settings import ServerSettings
from tests.engine.local.conftest import engine_of, tiny_model
from tests.server.conftest import FLOW, PATIENCE, YAML, Served, serving, wait_until

TEXT = "/v1/completions"
BOOM = RuntimeError("boom")
LONG = {"prompt": "x", "max_tokens": 6000, "ignore_eos": True}


@contextmanager
def ending(grace: float, delay_s: float = 0.01) -> Iterator[Served]:
    """A server that is told to end within the block, or ends because its engine does."""
    with (
        EchoEngine(delay_s=delay_s) as engine,
        serving(engine, ServerSettings(grace=grace), build=app.GracefulServer) as running,
    ):
        yield running
        assert running.has_ended()
        assert not engine.in_flight
        assert not running.service.in_flight and not running.service.calls


def test_a_stream_that_ends_in_time_is_whole() -> None:
    body = {**LONG, "max_tokens": 100, "stream": True}
    with ending(5, 0.005) as running, running.http() as http, http.stream("POST", TEXT, json=body) as answer:
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


def boom(running: Served) -> None:
    running.engine.fail(BOOM)


@pytest.mark.parametrize(("end", "grace"), [(Served.end, 0.2), (boom, PATIENCE)], ids=["told to", "its engine failed"])
def test_a_stream_that_is_not_over_by_then_is_told_so(end: Callable[[Served], None], grace: float) -> None:
    with (
        ending(grace) as running,
        running.http() as http,
        http.stream("POST", TEXT, json={**LONG, "stream": True}) as answer,
    ):
        events = [line for line in first_then(lambda: end(running), answer) if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2][6:])["error"]["code"] == "engine_closed"


def test_an_answer_that_goes_on_too_long_is_a_503() -> None:
    with ending(0.2) as running, ThreadPoolExecutor(1) as pool:
        calling = pool.submit(running.http().post, TEXT, json=LONG)
        wait_until(lambda: bool(running.service.in_flight))
        running.end()
        answer = calling.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_closed")
        assert answer.headers["retry-after"] == "1"


def test_a_run_without_a_listener_has_the_grace_too() -> None:
    with ending(5, 0.005) as running, running.http() as http:
        http.post("/v1/workflows", content=FLOW, headers=YAML)
        http.post("/v1/workflows/pair/runs", json={"inputs": {"user_question": "x" * 20}}).raise_for_status()
        running.end()
    assert only_run(running).status == "finished"


def only_run(running: Served) -> ServerRun:
    (run,) = running.service.keys.tenants[0].runs.values()
    return run


def test_new_calls_are_told_while_the_server_drains() -> None:
    body = {**LONG, "max_tokens": 100, "stream": True}
    with (
        ending(30) as running,
        running.http() as other,
        running.http() as http,
        http.stream("POST", TEXT, json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        running.end()
        wait_until(lambda: running.service.is_ending)
        assert (other.get("/ready").status_code, other.get("/health").status_code) == (503, 200)
        refused = other.post(TEXT, json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert list(lines)[-2:] == ["data: [DONE]", ""]


def test_an_idle_server_ends_at_once() -> None:
    with ending(grace=1000 * PATIENCE) as running:
        running.end()


def test_an_engine_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MARGIN_SECONDS", 1)
    told, over = threading.Event(), threading.Event()
    with EchoEngine() as engine:
        monkeypatch.setattr(engine, "cancel", lambda _: over.wait())
        build = partial(app.GracefulServer, on_failure=told.set)
        with serving(engine, ServerSettings(grace=0), build=build) as running:
            running.end()
            assert told.wait(PATIENCE) and running.has_ended()
            over.set()


# an engine that ends by itself ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_health_tells_an_engine_that_ended_by_itself_from_one_that_is_closed(fails: bool) -> None:
    made = EchoEngine() if fails else engine_of(tiny_model("llama"))
    with made as engine, serving(engine) as running, running.http() as http:
        assert [http.get(path).status_code for path in ("/health", "/ready")] == [200, 200]
        if fails:
            engine.fail(BOOM)
        else:
            engine.close()
        assert [http.get(path).status_code for path in ("/health", "/ready")] == [503 if fails else 200, 503]
        for refused in (http.get("/ready"), http.post(TEXT, json={"prompt": "x"})):
            assert refused.json()["error"]["code"] == "engine_closed"
            assert refused.headers["retry-after"] == "1"
        assert not fails or "boom" in http.get("/health").json()["error"]["message"]
        running.wait_quiet()


@pytest.mark.parametrize("stream", [False, True])
def test_a_run_that_an_engine_takes_with_it_has_failed(stream: bool) -> None:
    with ending(PATIENCE) as running, running.http() as http, ThreadPoolExecutor(1) as pool:
        http.post("/v1/workflows", content=FLOW, headers=YAML).raise_for_status()
        body = {"inputs": {"user_question": "x" * 2000}, "stream": stream}
        pool.submit(http.post, "/v1/workflows/pair/runs", json=body)
        wait_until(lambda: bool(running.engine.in_flight))
        boom(running)
    run = only_run(running)
    assert run.status == "failed"
    assert run.outcome["error"]["code"] == "engine_closed"
    assert "boom" in run.outcome["error"]["message"]
