"""Keys, limits, and that a tenant is what the server authenticated."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kedge.engine.echo import EchoEngine
from kedge.errors import ConfigError, LimitReached, Unauthenticated
from kedge.server.tenancy import Tenant, hashed, load_keys, new_key
from kedge.settings import LimitSettings, ServerSettings
from kedge.types import TenantId
from tests.server.conftest import FLOW, MODEL, YAML, Served, serving

A, B, OPERATOR = "key-of-a", "key-of-b", "key-of-operator"
VARIABLE = f"a:{hashed(A)},b:{hashed(B)} *:{hashed(OPERATOR)}"


@pytest.fixture(scope="module")
def two() -> Iterator[Served]:
    with EchoEngine() as engine, serving(engine, keys=load_keys(None, VARIABLE, LimitSettings())) as running:
        yield running


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer wrong", A, f"Basic {A}", f"Bearer {hashed(A)}"]
)
def test_who_is_not_known_is_turned_away(two: Served, header: str | None) -> None:
    ring = two.service.keys
    with pytest.raises(Unauthenticated):
        ring.of_headers({} if header is None else {"authorization": header})
    with two.http() as http:
        for path in ("/v1/models", "/v1/workflows", "/v1/runs", "/metrics"):
            answer = http.get(path, headers={"Authorization": (header or "").strip()})
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert answer.json()["error"]["code"] == "invalid_api_key"


def test_a_key_in_anthropics_header_is_a_key(two: Served) -> None:
    two.claude(B).messages.create(model=MODEL, max_tokens=9, messages=[{"role": "user", "content": "x"}])
    assert two.engine.requests[-1].tenant == "b"


def test_a_tenant_is_who_was_authenticated(two: Served) -> None:
    body = {"tenant": "b", "user": "b", "kedge": {"tenant": "b", "client": "b/../b", "run": "b"}, "cache_salt": "b"}
    two.client(A).completions.create(model=MODEL, prompt="x", extra_body=body)
    assert two.engine.requests[-1].tenant == "a"


def test_tenants_share_no_kv(two: Served) -> None:
    def cached(key: str, **body: object) -> int:
        answer = two.client(key).completions.create(model=MODEL, prompt="the same long prompt", extra_body=body)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert (cached(A), cached(A), cached(B), cached(B)) == (0, 19, 0, 19)
    assert (cached(A, cache_salt="s"), cached(A, cache_salt="s"), cached(A, cache_salt="t")) == (0, 19, 0)
    assert cached(B, cache_salt="s") == 0


def test_no_answer_has_a_number_of_the_whole_server(two: Served) -> None:
    answers = [two.client(A).completions.create(model=MODEL, prompt="x").model_dump_json() for _ in range(2)]
    assert not any(request.request_id in answer for request in two.engine.requests for answer in answers)


def test_workflows_and_runs_are_a_tenants_own(two: Served) -> None:
    with two.http(A) as a, two.http(B) as b:
        assert a.post("/v1/workflows", content=FLOW, headers=YAML).status_code == 201
        run = a.post("/v1/workflows/pair/runs", json={"inputs": {"user_question": "x"}}).json()["id"]
        assert a.get(f"/v1/runs/{run}").status_code == 200
        for path in ("/v1/workflows/pair", f"/v1/runs/{run}", f"/v1/runs/{run}/events"):
            assert b.get(path).status_code == 404
        assert b.post(f"/v1/runs/{run}/cancel").status_code == 404
        assert b.delete("/v1/workflows/pair").status_code == 404
        assert b.get("/v1/workflows").json()["data"] == b.get("/v1/runs").json()["data"] == []
        assert {request.tenant for request in two.engine.requests[-2:]} == {"a"}


def test_metrics_are_a_tenants_own_but_for_the_operator(two: Served) -> None:
    for key in (A, B):
        two.client(key).completions.create(model=MODEL, prompt="x")
    two.wait_quiet()
    own, whole = two.http(A).get("/metrics").text, two.http(OPERATOR).get("/metrics").text
    assert 'tenant="a"' in own and 'tenant="b"' not in own
    assert 'tenant="a"' in whole and 'tenant="b"' in whole
    assert two.http(OPERATOR).post("/v1/completions", json={"prompt": "x"}).status_code == 401, "and nothing else"


# limits ---------------------------------------------------------------------------------------------------------------


def test_requests_in_flight() -> None:
    tenant = Tenant(TenantId("a"), LimitSettings(requests_in_flight=2))
    tenant.admit(2)
    with pytest.raises(LimitReached, match="requests_in_flight=2"):
        tenant.admit(1)
    tenant.give_back()
    tenant.admit(1)
    assert tenant.in_flight == 2


@pytest.mark.parametrize("limit", [{"max_in_flight": 2}, {"limits": LimitSettings(requests_in_flight=2)}])
def test_more_than_may_ever_run_at_once_is_a_bad_request(limit: Any) -> None:
    with EchoEngine() as engine, serving(engine, ServerSettings(**limit)) as running, running.http() as http:
        for body, field in (({"prompt": "x", "n": 3}, "n"), ({"prompt": ["x"] * 3}, "prompt")):
            answer = http.post("/v1/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_tokens_per_minute() -> None:
    now = [0.0]
    tenant = Tenant(TenantId("a"), LimitSettings(tokens_per_minute=60), clock=lambda: now[0])
    tenant.admit(1)
    tenant.allowed_tokens.use(79)
    with pytest.raises(LimitReached) as caught:
        tenant.admit(1)
    assert caught.value.retry_after == 20
    now[0] = caught.value.retry_after
    tenant.admit(1)
    now[0] = 1000
    tenant.allowed_tokens.use(60)
    with pytest.raises(LimitReached) as caught:
        tenant.admit(1)
    assert caught.value.retry_after == 1, "a minute's worth is all that is saved up"


def test_too_many_requests_over_http() -> None:
    keys = load_keys(None, VARIABLE, LimitSettings(requests_in_flight=4, tokens_per_minute=10))
    with EchoEngine() as engine, serving(engine, keys=keys) as running:
        running.client(A).completions.create(model=MODEL, prompt="x" * 20, max_tokens=1)
        with pytest.raises(openai.RateLimitError) as caught:
            running.client(A).completions.create(model=MODEL, prompt="x")
        assert caught.value.code == "rate_limit_exceeded"
        assert int(caught.value.response.headers["retry-after"]) in range(60, 74)
        assert running.http(A).post("/v1/messages/count_tokens", json={"messages": []}).status_code == 429
        running.client(B).completions.create(model=MODEL, prompt="x")
        assert 'status="429",tenant="a"} 2.0' in running.http(OPERATOR).get("/metrics").text


@pytest.mark.parametrize("stream", [False, True])
def test_whoever_has_heard_the_end_may_call_again(stream: bool) -> None:
    settings = ServerSettings(limits=LimitSettings(requests_in_flight=2))
    with EchoEngine() as engine, serving(engine, settings) as running, running.http() as http:
        body = {"prompt": "x", "max_tokens": 1, "n": 2, "stream": stream}
        assert {http.post("/v1/completions", json=body).status_code for _ in range(20)} == {200}
        running.wait_quiet()
        assert running.service.in_flight == 0


# keys -----------------------------------------------------------------------------------------------------------------


def test_a_file_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    key = new_key()
    file.write_text(
        f'[tenants.acme]\nkeys = ["{hashed(key)}"]\nrequests_in_flight = 3\n'
        f'host_memory = "1MiB"\n[operator]\nkeys = ["{hashed(A)}"]\n'
    )
    ring = load_keys(file, f"other:{hashed(B)},acme:{hashed('more')}", LimitSettings(requests_in_flight=9))
    assert not ring.is_open
    acme, other = ring.of_headers({"authorization": f"Bearer {key}"}), ring.of_headers({"authorization": f"bearer {B}"})
    assert ring.of_headers({"x-api-key": "more"}) is acme, "all keys of a tenant have its limits"
    assert (acme.id, acme.limits) == ("acme", LimitSettings(requests_in_flight=3, host_memory=1 << 20))
    assert (other.id, other.limits) == ("other", LimitSettings(requests_in_flight=9))
    assert ring.of_headers({"authorization": f"Bearer {A}"}).is_operator
    assert not acme.is_operator


def test_tenants_are_those_who_may_generate_and_without_keys_everyone_is_one() -> None:
    assert [tenant.id for tenant in load_keys(None, VARIABLE, LimitSettings()).tenants] == ["a", "b"]
    ring = load_keys(None, None, LimitSettings())
    assert ring.is_open and [tenant.id for tenant in ring.tenants] == ["default"]
    assert ring.of_headers({}).id == ring.of_headers({"authorization": "Bearer anything"}).id == TenantId("default")


KEYED = f"keys = ['{hashed(A)}']"
BAD_FILES = [
    "", "[", "tenants = 5", "[tenants]\nacme = 5", "[other]", f"[tenants.'a/b']\n{KEYED}",
    *(f"[tenants.acme]\n{said}" for said in (
        "keys = []", "keys = [5]", "keys = ['sk-secret']", f"keys = ['{hashed(A)}', '{hashed(A)}']",
        f"{KEYED}\nspeed = 1", f"{KEYED}\nanchors = true", f"{KEYED}\nanchor_bytes = 'much'",
        f"{KEYED}\nrequests_in_flight = 0",
    )),
]  # fmt: skip
BAD_VARIABLES = ["acme", "acme:sk-secret", f":{hashed(A)}", f"a:{hashed(A)},b:{hashed(A)}"]


@pytest.mark.parametrize(
    ("text", "variable"), [*((text, None) for text in BAD_FILES), *(("", one) for one in BAD_VARIABLES)]
)
def test_a_bad_file_or_variable_is_an_error_that_shows_no_key(tmp_path: Path, text: str, variable: str | None) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_keys(file, variable, LimitSettings())
    assert "sk-secret" not in str(caught.value)


def test_a_salt_never_leads_into_another_tenants_namespace() -> None:
    ring = load_keys(None, VARIABLE, LimitSettings())
    a, b = ring.of_headers({"authorization": f"Bearer {A}"}), ring.of_headers({"authorization": f"Bearer {B}"})
    spaces = [tenant.namespace(salt) for tenant in (a, b) for salt in ("", "a", "b", "/b", "../b")]
    assert len(set(spaces)) == len(spaces)
    assert all(space.tenant in ("a", "b") for space in spaces)
