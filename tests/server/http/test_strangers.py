"""Callers without a key, half requests and too many connections, and an engine that hangs."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from kedge.engine.echo import EchoEngine
from kedge.engine.process.engine import ProcessEngine
from kedge.server import middleware
from kedge.server.logs import Seldom
from kedge.server.middleware import BoundedConnection
from kedge.server.service import Service
from kedge.server.tenancy import load_keys
from kedge.settings import LimitSettings
from tests.server.conftest import PATIENCE, wait_until
from tests.server.test_shutdown import Ending
from tests.server.test_tenancy import VARIABLE, A

CHAT = "/v1/chat/completions"


class Running(Ending):
    """The same for callers with and without a key."""

    def __init__(self, engine: EchoEngine | ProcessEngine, grace: float = 1.0) -> None:
        super().__init__(engine, grace, keys=load_keys(None, VARIABLE, LimitSettings()), key=A)

    def connect(self, sent: bytes = b"") -> socket.socket:
        opened = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        opened.sendall(sent)
        return opened

    def end(self) -> None:
        super().end()
        assert self.joined()


@pytest.fixture
def running() -> Iterator[Running]:
    with EchoEngine() as engine:
        one = Running(engine)
        yield one
        one.end()


def head(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Content-Type: application/json", *lines, "", ""]).encode()


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["Host: localhost"], b"401"),
        (["Host: localhost", "Authorization: Bearer wrong"], b"401"),
        (["Host: localhost", "x-api-key: wrong"], b"401"),
        (["Host: evil.example", f"Authorization: Bearer {A}"], b"421"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/hints", "/v1/workflows", "/nothing"])
def test_a_body_is_not_read_before_key_and_host(running: Running, path: str, lines: list[str], status: bytes) -> None:
    with running.connect(head(path, *lines, "Content-Length: 4000000")) as opened:  # whose body never comes
        answer = opened.recv(4096)
        while not answer.endswith(b"}"):
            answer += opened.recv(4096)
    assert answer.split()[1] == status
    assert (b'"type":"error"' in answer) == (path == "/v1/messages")


def test_a_request_of_two_lengths_is_refused(running: Running) -> None:
    lines = ["Host: localhost", f"Authorization: Bearer {A}", "Content-Length: 5", "Transfer-Encoding: chunked"]
    with running.connect(head(CHAT, *lines) + b"0\r\n\r\n") as opened:
        assert opened.recv(4096).split()[1] == b"400"


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"POST /v1/hints HTTP/1.1\r\nHost: local"])
def test_half_a_head_is_waited_for_only_so_long(running: Running, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedConnection, "head_seconds", 0.05)
    with running.connect(sent) as opened:
        assert opened.recv(100) == b""
    with running.connect(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as opened:
        assert opened.recv(4096).split()[1] == b"200"
        opened.sendall(b"GET /health HTT")  # the second one of a connection
        while opened.recv(4096):
            pass


def test_many_half_requests_keep_nobody_out(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "most_connections", lambda: 20)
    opened = [running.connect(b"GET / HTTP/1.1\r\nHost: lo") for _ in range(60)]
    with running.client() as http:
        assert [http.get("/health").status_code for _ in range(3)] == [200] * 3
    wait_until(lambda: len(running.server.server_state.connections) <= 21)
    for one in opened:
        one.close()


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models"])
def test_a_head_is_answered_like_a_get_without_its_body(running: Running, path: str) -> None:
    with running.client() as http:
        answer = http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-type"] == http.get(path).headers["content-type"]


def test_a_warning_that_strangers_cause_is_logged_once_a_minute() -> None:
    seldom = Seldom()

    def record(message: str, at: float, level: int = logging.WARNING) -> logging.LogRecord:
        one = logging.LogRecord("asyncio", level, "", 0, message, (), None)
        one.created = at
        return one

    passed = [at for at in range(150) if seldom.filter(record("socket.accept() out of system resource", at))]
    assert passed == [0, 60, 120]
    assert seldom.filter(record("another", 121.0))
    assert all(seldom.filter(record("started", at, logging.INFO)) for at in range(3))


# an engine that hangs -------------------------------------------------------------------------------------------------


def test_a_server_whose_engine_hangs_says_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.engine.process.engine.ENDING", 0.5)
    monkeypatch.setattr("kedge.server.app.MARGIN_SECONDS", 0.5)
    monkeypatch.setattr(Service.watch, "__defaults__", (0.05, 0.5))
    monkeypatch.setattr(Service.shut, "__defaults__", (0.2,))
    engine = ProcessEngine(partial(EchoEngine, delay_s=0.01))
    running = Running(engine, grace=0.2)
    try:
        with running.client() as http:
            assert http.get("/health").status_code == 200
            body = {"prompt": "x", "max_tokens": 5000, "ignore_eos": True}
            threading.Thread(target=lambda: http.post("/v1/completions", json=body), daemon=True).start()
            wait_until(lambda: bool(running.service.calls))
            time.sleep(0.7)
            assert http.get("/health").status_code == 200, "it takes its time, and steps"
            os.kill(engine.pid, signal.SIGSTOP)
            with running.client() as other:
                wait_until(lambda: other.get("/health").status_code == 503)
                assert "hung" in other.get("/health").json()["error"]["message"]
            os.kill(engine.pid, signal.SIGCONT)
            with running.client() as other:
                wait_until(lambda: other.get("/health").status_code == 200)
            os.kill(engine.pid, signal.SIGSTOP)
            running.end()
    finally:
        engine.close()
    assert engine._process.returncode == -signal.SIGKILL
