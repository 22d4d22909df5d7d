"""An engine that ends by itself: the server says so, ends too, and comes back with what it had learned."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

import httpx
import pytest

from kedge.cli.serve import EXIT_ENGINE_ENDED
from kedge.engine.common.watched import WatchedEngine
from kedge.engine.echo import EchoEngine
from kedge.server.history import History
from tests.processes import children, is_alive, linux_only
from tests.server.conftest import FLOW, PATIENCE, YAML, Served, serving, wait_until
from tests.server.test_shutdown import LONG, Ending

ROOT = Path(__file__).parents[2]
BOOM = RuntimeError("boom")


@contextmanager
def failing(grace: float = 60.0, delay_s: float = 0.01) -> Iterator[tuple[Ending, EchoEngine]]:
    """A server that ends because its engine does, within the block: there is a minute's grace that it must not take."""
    with EchoEngine(delay_s=delay_s) as engine:
        running = Ending(engine, grace)
        yield running, engine
        assert running.joined()
        assert not engine.in_flight
        assert running.service.is_quiet


def statuses(running: Served) -> list[int]:
    with running.http() as http:
        return [http.get(path).status_code for path in ("/health", "/ready")]


def test_health_tells_an_engine_that_ended_by_itself_from_one_that_works() -> None:
    with EchoEngine() as engine, serving(engine) as running:
        assert statuses(running) == [200, 200]
        engine.fail(BOOM)
        assert statuses(running) == [503, 503]
        error = running.http().get("/health").json()["error"]
        assert error["code"] == "engine_closed"
        assert "boom" in error["message"]


def test_an_engine_that_was_closed_has_not_failed() -> None:
    engine = EchoEngine()
    engine.close()
    assert engine.failure is None
    failed = EchoEngine()
    failed.fail(BOOM)
    failed.close()
    assert failed.failure is BOOM
    assert WatchedEngine(failed, History()).failure is BOOM


def test_a_server_whose_engine_fails_ends_and_its_streams_are_told() -> None:
    with (
        failing() as (running, engine),
        running.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        engine.fail(BOOM)
        events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2][6:])["error"]["code"] == "engine_closed"


def test_a_call_that_an_engine_takes_with_it_is_a_503() -> None:
    with failing() as (running, engine):
        answers: list[httpx.Response] = []
        caller = threading.Thread(target=lambda: answers.append(running.http.post("/v1/completions", json=LONG)))
        caller.start()
        wait_until(lambda: bool(engine.in_flight))
        engine.fail(BOOM)
        caller.join(PATIENCE)
        assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "engine_closed")


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
    assert run.events[-1].data["error"]["code"] == "engine_closed"
    assert "boom" in run.events[-1].data["error"]["message"]


# real processes -------------------------------------------------------------------------------------------------------

MORTAL = """
from kedge.cli import serve
from kedge.cli.main import app
from kedge.engine.echo import EchoEngine
from kedge.engine.local.engine import LocalEngine

def is_deadly(engine, request):
    return "die" in engine.tokenizer.decode(request.tokens)

class MortalEcho(EchoEngine):
    def submit(self, request):
        if is_deadly(self, request):
            self.fail(RuntimeError("boom"))
        return super().submit(request)

class MortalLocal(LocalEngine):
    failure = None
    def submit(self, request):
        if is_deadly(self, request):
            self.failure = RuntimeError("boom")
            self.close()
        return super().submit(request)
"""
LOCAL = f"{MORTAL}\nserve.open_engine = lambda settings, _: MortalLocal(None, settings.engine)\napp()"
HANG = """
import time
from kedge.workflow.spec import TOOLS
TOOLS["hang"] = "__main__:hang"
def hang(answer, inputs): time.sleep(1000)
"""
ECHO = "\nserve.HANG_SECONDS = 3.0\nserve.open_engine = lambda settings, _: MortalEcho()\napp()"
RUNS_CODE = """
from kedge.workloads.sandbox import SandboxLimits, run_python
def hang(answer, inputs): run_python("import time; time.sleep(1000)", SandboxLimits(seconds=1000))
"""
HANGS = """
name: hangs
agents: [{id: a, user: "{user_question}", tool: hang, tool_seconds: 1000}]
"""


LIMIT = 300.0
"""Seconds that a process may run"""


class Process:
    """`kedge serve` with an engine that ends by itself once a prompt says `die`."""

    def __init__(self, code: str, *args: str, folder: Path) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "KEDGE_API_KEYS": "",
            "KEDGE_ENGINE__PLANNER__BY_COST": "false",  # what is learned here is not to depend on this machine
            "KEDGE_ENGINE__PLANNER__MOVE": "never",  # of answers too, at the first question
        }
        code = f"from kedge.engine.common.state import saving; saving.SNAPSHOT_SECONDS = 0.2\n{code}"
        command = [sys.executable, "-c", code, "serve", *args, "--port", "0", "--log-format", "json"]
        self.popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=folder)
        self.watchdog = Timer(LIMIT, self.popen.kill)  # its log ends then, so that no test waits for a line for ever
        self.watchdog.start()
        self.lines: list[str] = []
        self.http = httpx.Client(base_url=re.search(r"http://\S+", self.until("running on http"))[0], timeout=60)

    def until(self, text: str) -> str:
        """Read the log up to a line with this text."""
        assert self.popen.stderr
        for line in self.popen.stderr:
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError(f"it ended without {text!r}: {self.lines}")

    def die(self) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": "die"})


@contextmanager
def process(code: str, *args: str, folder: Path) -> Iterator[Process]:
    running = Process(code, *args, folder=folder)
    try:
        yield running
    finally:
        running.watchdog.cancel()
        running.popen.kill()
        running.popen.communicate()


@pytest.mark.slow
def test_the_process_exits_with_a_code_and_comes_back_with_its_state(tmp_path: Path) -> None:
    with process(LOCAL, "--state", "state", folder=tmp_path) as running:
        running.http.post("/v1/workflows", content=FLOW, headers=YAML).raise_for_status()
        for question in ("How much is one and two?", "How much is three and four?"):
            body = {"inputs": {"user_question": question}, "stream": True}
            assert "event: finished" in running.http.post("/v1/workflows/pair/runs", json=body).text
        saved = re.search(r"saved ([1-9]\d* pools)", running.until("saved 2 pools"))
        assert running.die().json()["error"]["code"] == "engine_closed"
        assert "boom" in running.until("the engine ended by itself")
        assert running.popen.wait(60) == EXIT_ENGINE_ENDED
    with process(LOCAL, "--state", "state", folder=tmp_path) as running:
        assert any(f"loaded {saved[1]}" in line for line in running.lines)
        assert running.http.get("/health").status_code == 200
        assert running.http.post("/v1/completions", json={"prompt": "live", "max_tokens": 4}).status_code == 200


def hanging_run(running: Process) -> None:
    """Start a run whose tool hangs, and wait until it does."""
    running.http.post("/v1/workflows", content=HANGS, headers=YAML).raise_for_status()
    sleeps = {"inputs": {"user_question": "?"}}
    events = running.http.post("/v1/workflows/hangs/runs", json=sleeps).json()["events"]
    with running.http.stream("GET", events) as told:
        assert any(line == "event: answered" for line in told.iter_lines())


def test_what_hangs_does_not_keep_the_process(tmp_path: Path) -> None:
    with process(MORTAL + HANG + ECHO, "--tools", folder=tmp_path) as running:
        hanging_run(running)
        assert running.die().status_code == 503
        assert running.http.get("/health").status_code == 503
        assert running.popen.wait(60) == EXIT_ENGINE_ENDED


@linux_only
def test_code_that_a_tool_runs_ends_with_the_process(tmp_path: Path) -> None:
    with process(MORTAL + HANG + RUNS_CODE + ECHO, "--tools", folder=tmp_path) as running:
        hanging_run(running)
        wait_until(lambda: bool(children(running.popen.pid)))
        codes = children(running.popen.pid)
        running.die()
        assert running.popen.wait(60) == EXIT_ENGINE_ENDED
        wait_until(lambda: not any(map(is_alive, codes)))
