"""Who may be meant by a call, and in what types bodies come: no page of another site does anything here."""

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, repeat

import httpx
import pytest
from fastapi import FastAPI

from kedge.engine.echo import EchoEngine
from kedge.engine.process.engine import ProcessEngine
from kedge.server import middleware
from kedge.server.app import GracefulServer
from kedge.server.middleware import BoundedConnection, HostCheck
from kedge.server.service import Service
from kedge.server.tenancy import load_keys
from kedge.settings import LimitSettings, ServerSettings
from tests.server.conftest import FLOW, Served, serving, wait_until
from tests.server.test_tenancy import VARIABLE, A

TEXT, FLOWS, RUNS = "/v1/completions", "/v1/workflows", "/v1/workflows/pair/runs"
SIMPLE = ["application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain", "text/plain;json", None]
"""What a browser sends to another site without asking it first."""


LOOPBACK = ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.0.0.1:80", "127.8.9.1:8000", "[::1]:8000"]
FOREIGN = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "[::2]"]
BROKEN = ["", ":", ":80", "[::1", "::1", "[localhost]x", "localhost:80:80", "localhost:x", "localhost evil", "[[::1]]"]
TRUST: list[tuple[str, list[str], list[list[str]], bool]] = [
    *((bound, allowed, [[host] for host in LOOPBACK], True) for bound, allowed in (
        ("127.0.0.1", []), ("192.168.1.5", []), ("0.0.0.0", ["kedge"]),
    )),
    ("127.0.0.1", [], [[host] for host in (*FOREIGN, *BROKEN)], False),
    ("127.0.0.1", ["localhost", "other.example"], [[host] for host in (*FOREIGN, *BROKEN)], False),
    ("127.0.0.1", [], [[], ["localhost", "evil.example"]], False),
    ("192.168.1.5", [], [["192.168.1.5:8000"]], True),
    ("192.168.1.5", [], [["192.168.1.6"]], False),
    ("Kedge.lan", [], [["kedge.lan"]], True),
    ("2001:db8::1", [], [["[2001:DB8:0::1]:80"]], True),
    *((bound, [], hosts, trusted) for bound in ("0.0.0.0", "::", "") for hosts, trusted in (
        ([["10.1.2.3:8000"], ["[fe80::1]"]], True),
        ([["evil.example"], ["2130706433"]], False),  # browsers write an address as an address
    )),
    ("127.0.0.1", ["kedge.example", "fd00::7"], [["Kedge.example:443"], ["[fd00::7]:1"]], True),
    ("127.0.0.1", ["kedge.example"], [["x.kedge.example"]], False),
    ("127.0.0.1", ["*"], [["evil.example"], []], True),
]  # fmt: skip


@pytest.mark.parametrize(("bound", "allowed", "calls", "trusted"), TRUST)
def test_a_call_names_one_trusted_host(bound: str, allowed: list[str], calls: list[list[str]], trusted: bool) -> None:
    hosts = HostCheck(FastAPI(), bound, allowed)
    assert [hosts.trusts(call) for call in calls] == [trusted] * len(calls)


@pytest.mark.parametrize(("method", "path"), [("GET", "/"), ("GET", "/nothing"), ("POST", TEXT)])
def test_a_call_by_another_name_is_refused(http: httpx.Client, method: str, path: str) -> None:
    answer = http.request(method, path, headers={"Host": "evil.example:8000"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (421, "Host", "untrusted_host")
    assert "evil.example:8000" in error["message"]
    assert "--allowed-host" in error["message"]


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_call_by_any_name(http: httpx.Client, path: str) -> None:
    assert http.get(path, headers={"Host": "10.42.0.7:8000"}).status_code == 200


def test_a_name_that_is_allowed_is_answered() -> None:
    allowed = ServerSettings(allowed_hosts=("kedge",))
    with EchoEngine() as engine, serving(engine, allowed) as running, running.http() as http:
        for host, status in (("kedge:80", 200), ("x:80", 421)):
            assert http.get("/v1/models", headers={"Host": host}).status_code == status


# types of bodies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SIMPLE)
@pytest.mark.parametrize("path", [TEXT, "/v1/chat/completions", "/v1/hints", RUNS, FLOWS])
def test_a_body_that_a_browser_sends_unasked_is_refused(
    http: httpx.Client, served: Served, path: str, kind: str | None
) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    answer = http.post(path, content=b'{"prompt": "x", "inputs": {"user_question": "x"}}', headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert repr(kind or "") in answer.json()["error"]["message"]
    assert not served.engine.requests


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/x+json"])
def test_json_by_any_of_its_names_is_read(http: httpx.Client, kind: str) -> None:
    assert http.post(TEXT, content=b'{"prompt": "x"}', headers={"Content-Type": kind}).status_code == 200


@pytest.mark.parametrize("kind", ["application/yaml", "text/yaml", "application/x-yaml; charset=utf-8", "text/x-yaml"])
def test_yaml_is_read_where_workflows_are_registered_and_nowhere_else(http: httpx.Client, kind: str) -> None:
    assert http.post(FLOWS, content=FLOW, headers={"Content-Type": kind}).status_code in (200, 201)
    assert http.post(TEXT, content=b'{"prompt": "x"}', headers={"Content-Type": kind}).status_code == 415


@pytest.mark.parametrize("path", [TEXT, FLOWS, RUNS])
def test_a_browser_that_asks_first_is_allowed_nothing(http: httpx.Client, path: str) -> None:
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    answer = http.options(path, headers={**asked, "Access-Control-Request-Headers": "content-type"})
    assert answer.status_code == 405
    assert not any(name.startswith("access-control") for name in answer.headers)


CHAT = "/v1/chat/completions"


@pytest.fixture
def running() -> Iterator[Served]:
    """For callers with and without a key."""
    keys = load_keys(None, VARIABLE, LimitSettings())
    with EchoEngine() as engine, serving(engine, ServerSettings(grace=1), keys, build=GracefulServer) as one:
        yield one


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
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/hints", "/v1/workflows"])
def test_a_body_is_not_read_before_key_and_host(running: Served, path: str, lines: list[str], status: bytes) -> None:
    with running.connect(head(path, *lines, "Content-Length: 4000000")) as opened:  # whose body never comes
        answer = opened.recv(4096)
        while not answer.endswith(b"}"):
            answer += opened.recv(4096)
    assert answer.split()[1] == status
    assert (b'"type":"error"' in answer) == (path == "/v1/messages")


def test_a_request_of_two_lengths_is_refused(running: Served) -> None:
    lines = ["Host: localhost", f"Authorization: Bearer {A}", "Content-Length: 5", "Transfer-Encoding: chunked"]
    with running.connect(head(CHAT, *lines) + b"0\r\n\r\n") as opened:
        assert opened.recv(4096).split()[1] == b"400"


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"POST /v1/hints HTTP/1.1\r\nHost: local"])
def test_half_a_head_is_waited_for_only_so_long(running: Served, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedConnection, "head_seconds", 0.05)
    with running.connect(sent) as opened:
        assert opened.recv(100) == b""
    with running.connect(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as opened:
        assert opened.recv(4096).split()[1] == b"200"
        opened.sendall(b"GET /health HTT")  # the second one of a connection
        while opened.recv(4096):
            pass


def test_a_proxy_may_call_again_after_a_minute(running: Served) -> None:
    with running.http() as http:
        http.get("/health")
        (opened,) = running.server.server_state.connections
        wait_until(lambda: opened._waits is not None)  # which it does once the answer is sent
        assert min(opened.timeout_keep_alive, opened._waits.when() - opened.loop.time()) > 60


def test_an_answer_that_nobody_reads_is_cut_off(running: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.05)
    body = json.dumps({"prompt": "x" * 8000, "echo": True, "logprobs": 20, "max_tokens": 1, "stream": True})
    lines = ["Host: localhost", f"Authorization: Bearer {A}", f"Content-Length: {len(body)}"]
    with running.connect(head(TEXT, *lines) + body.encode()) as opened:
        wait_until(lambda: bool(running.engine.requests))
        more = chain([b"GET / HTTP/1.1\r\nX: "], repeat(b"x"))  # that the next head comes meanwhile is no excuse
        with pytest.raises(ConnectionError):
            wait_until(lambda: not opened.send(next(more)))


@pytest.mark.parametrize("rest", [b"", b"calhost\r\n\r\n"])
def test_many_half_requests_and_idle_ones_keep_nobody_out(
    running: Served, monkeypatch: pytest.MonkeyPatch, rest: bytes
) -> None:
    monkeypatch.setattr(middleware, "most_connections", lambda: 20)
    opened = [running.connect(b"GET / HTTP/1.1\r\nHost: lo" + rest) for _ in range(60)]
    for one in opened if rest else ():
        with suppress(ConnectionError):  # cut, else answered
            one.recv(99)
    with running.http(A) as http:
        assert [http.get("/health").status_code for _ in range(3)] == [200] * 3
    wait_until(lambda: len(running.server.server_state.connections) <= 21)
    for one in opened:
        one.close()


@pytest.mark.parametrize(("soft", "hard", "files"), [(1024, 1 << 20, 1 << 15), (1024, 1024, 1024), (-1, -1, 1 << 15)])
def test_connections_leave_files_for_others(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, files: int) -> None:
    limits = [(256, 1 << 62)]  # more than any system allows, so that it refuses to raise it
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    assert middleware.open_files() == 256
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    assert middleware.open_files() == files == middleware.open_files()
    assert middleware.most_connections() + 4 * (files // 16) < files


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models"])
def test_a_head_is_answered_like_a_get_without_its_body(running: Served, path: str) -> None:
    with running.http(A) as http:
        answer = http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-type"] == http.get(path).headers["content-type"]


# an engine that hangs -------------------------------------------------------------------------------------------------


def test_a_server_whose_engine_hangs_says_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.engine.process.engine.ENDING", 0.5)
    monkeypatch.setattr("kedge.server.app.MARGIN_SECONDS", 0.5)
    monkeypatch.setattr(Service.watch, "__defaults__", (0.05, 0.5))
    monkeypatch.setattr(Service.shut, "__defaults__", (0.2,))
    with (
        ProcessEngine(partial(EchoEngine, delay_s=0.01)) as engine,
        serving(engine, ServerSettings(grace=0.2), build=GracefulServer) as running,
        running.http() as http,
    ):
        assert http.get("/health").status_code == 200
        body = {"prompt": "x", "max_tokens": 5000, "ignore_eos": True}
        threading.Thread(target=lambda: http.post("/v1/completions", json=body), daemon=True).start()
        wait_until(lambda: bool(running.service.calls))
        time.sleep(0.7)
        assert http.get("/health").status_code == 200, "it takes its time, and steps"
        os.kill(engine.pid, signal.SIGSTOP)
        wait_until(lambda: http.get("/health").status_code == 503)
        assert "hung" in http.get("/health").json()["error"]["message"]
        os.kill(engine.pid, signal.SIGCONT)
        wait_until(lambda: http.get("/health").status_code == 200)
        os.kill(engine.pid, signal.SIGSTOP)
        running.end()
        assert running.has_ended()
    assert engine._process.returncode == -signal.SIGKILL
