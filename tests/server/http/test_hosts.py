"""Who may be meant by a call, and in what types bodies come: no page of another site does anything here."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from kedge.engine.echo import EchoEngine
from kedge.errors import ConfigError
from kedge.server.middleware import TrustedHosts
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


def trusts(header: str, bound: str = "127.0.0.1", *allowed: str) -> bool:
    return TrustedHosts(bound, allowed).trusts([header])


LOOPBACK = ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.0.0.1:80", "127.8.9.1:8000", "[::1]:8000"]
FOREIGN = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "[::2]"]
BROKEN = ["", ":", ":80", "[::1", "::1", "[localhost]x", "localhost:80:80", "localhost:x", "localhost evil", "[[::1]]"]


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_names_are_trusted_whatever_the_server_is_bound_to(host: str) -> None:
    assert trusts(host)
    assert trusts(host, "192.168.1.5")
    assert trusts(host, "0.0.0.0", "kedge")


@pytest.mark.parametrize("host", [*FOREIGN, *BROKEN])
def test_nothing_else_is_trusted_on_a_loopback_address(host: str) -> None:
    assert not trusts(host)
    assert not trusts(host, "localhost", "other.example")


def test_the_address_that_the_server_is_bound_to_is_trusted() -> None:
    assert trusts("192.168.1.5:8000", "192.168.1.5")
    assert trusts("kedge.lan", "Kedge.lan")
    assert trusts("[2001:DB8:0::1]:80", "2001:db8::1")
    assert not trusts("192.168.1.6", "192.168.1.5")


@pytest.mark.parametrize("bound", ["0.0.0.0", "::", ""])
def test_a_server_on_every_address_trusts_addresses_but_no_names(bound: str) -> None:
    assert trusts("10.1.2.3:8000", bound)
    assert trusts("[fe80::1]", bound)
    assert not trusts("evil.example", bound)
    assert not trusts("2130706433", bound), "browsers write an address as an address"


def test_allowed_hosts_are_trusted() -> None:
    assert trusts("Kedge.example:443", "127.0.0.1", "kedge.example")
    assert trusts("[fd00::7]:1", "127.0.0.1", "fd00::7")
    assert not trusts("x.kedge.example", "127.0.0.1", "kedge.example")
    assert trusts("evil.example", "127.0.0.1", "*")


def test_a_call_must_name_one_host() -> None:
    hosts = TrustedHosts("127.0.0.1", ())
    assert not hosts.trusts([])
    assert not hosts.trusts(["localhost", "evil.example"])
    assert TrustedHosts("127.0.0.1", ["*"]).trusts([])


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


def test_another_name_neither_registers_nor_runs_anything(open_to_tools: Served) -> None:
    with open_to_tools.http() as http:
        for kind in ("application/yaml", "text/plain"):
            http.post(FLOWS, content=FLOW, headers={"Host": "evil.example", "Content-Type": kind})
        assert http.get(FLOWS).json()["data"] == []


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
