"""Who may be meant by a call, and in what types bodies come: no page of another site does anything here."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI

from kedge.engine.echo import EchoEngine
from kedge.errors import ConfigError
from kedge.server.middleware import HostCheck
from kedge.settings import ServerSettings
from tests.server.conftest import FLOW, Served, serving

TEXT, FLOWS, RUNS = "/v1/completions", "/v1/workflows", "/v1/workflows/pair/runs"
ROUTES = [
    ("GET", "/"),
    ("GET", "/static/index.html"),
    ("GET", "/openapi.json"),
    ("GET", "/metrics"),
    ("GET", "/nothing"),
    ("GET", "/v1/models"),
    ("GET", "/v1/runs"),
    ("GET", "/v1/dashboard"),
    ("POST", FLOWS),
    ("POST", RUNS),
    ("POST", TEXT),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/hints"),
    ("DELETE", "/v1/workflows/pair"),
]
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
def test_a_call_must_name_one_host_that_is_trusted(
    bound: str, allowed: list[str], calls: list[list[str]], trusted: bool
) -> None:
    hosts = HostCheck(FastAPI(), bound, allowed)
    assert [hosts.trusts(call) for call in calls] == [trusted] * len(calls)


@pytest.mark.parametrize("host", ["kedge:8000", "http://kedge", "", "a b", "*.example", "[::1"])
def test_a_setting_that_could_never_match_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.allowed_hosts"):
        ServerSettings(allowed_hosts=(host,))


@pytest.fixture(scope="module")
def open_to_tools() -> Iterator[Served]:
    """As careless as it gets: no keys, and tools."""
    with EchoEngine() as engine, serving(engine, ServerSettings(tools=True)) as running:
        yield running


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_call_by_another_name_is_refused_on_every_route(open_to_tools: Served, method: str, path: str) -> None:
    with open_to_tools.http() as http:
        answer = http.request(method, path, headers={"Host": "evil.example:8000"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (421, "Host", "untrusted_host")
    assert "evil.example:8000" in error["message"]
    assert "--allowed-host" in error["message"]


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_call_by_any_name(http: httpx.Client, path: str) -> None:
    assert http.get(path, headers={"Host": "10.42.0.7:8000"}).status_code == 200


def test_a_name_that_is_allowed_is_answered() -> None:
    with EchoEngine() as engine, serving(engine, ServerSettings(allowed_hosts=("kedge",))) as running:
        statuses = [
            running.http().get("/v1/models", headers={"Host": host}).status_code for host in ("kedge:80", "x:80")
        ]
    assert statuses == [200, 421]


# types of bodies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SIMPLE)
@pytest.mark.parametrize("path", [TEXT, "/v1/chat/completions", "/v1/hints", RUNS, FLOWS])
def test_a_body_that_a_browser_sends_unasked_is_refused(open_to_tools: Served, path: str, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    with open_to_tools.http() as http:
        answer = http.post(path, content=b'{"prompt": "x", "inputs": {"user_question": "x"}}', headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert repr(kind or "") in answer.json()["error"]["message"]
    assert not open_to_tools.engine.requests


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
