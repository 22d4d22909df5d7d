"""Hints over HTTP: a client is told what was understood, and hints without a prompt have bounds of their own."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kedge.engine.echo import EchoEngine
from kedge.server.tenancy import KeyRing, hashed, load_keys
from kedge.settings import LimitSettings
from kedge.types import TenantId, TurnHints
from tests.coding_clients import events, with_other_ids
from tests.engine.local.conftest import engine_of, tiny_model
from tests.server.conftest import MODEL, Served, Talking, serving


def test_a_client_is_told_what_was_understood(http: httpx.Client, served: Served) -> None:
    body = {"prompt": "x", "kedge": {"agent": "a", "mood": 1}, "shape": "round"}
    answer = http.post("/v1/completions", json=body, headers={"X-Session-Id": "s"}).json()
    assert answer["kedge"]["hints"] == {"agent": "a", "session": "s", "run": "s"}
    text = http.get("/metrics").text
    for dialect in ("kedge", "body"):
        assert f'dialect="{dialect}",model_name="kedge-nano",reason="unknown",tenant="default"}} 1.0' in text
    assert served.engine.requests[-1].agent == "a"


MARK = {"type": "ephemeral", "ttl": "1h"}
PART = {"type": "text", "text": "hi", "cache_control": MARK}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [PART]}]}),
        ("/v1/responses", {"input": "hi", "prompt_cache_retention": "24h"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [PART]}], "max_tokens": 5}),
    ],
)
def test_every_protocol_asks_in_its_own_words_that_a_session_is_kept(
    http: httpx.Client, served: Served, path: str, body: dict[str, object]
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["kedge"]["hints"]["keep_for"] == 3600
    assert served.engine.requests[-1].turn.keep_for == 3600


def test_an_answer_says_what_became_of_each_action(http: httpx.Client, served: Served) -> None:
    actions = [
        {"action_id": "1", "action_type": "kv.retain@1.0", "action_version": "1.0", "payload": {"duration": 60}},
        {"action_id": "2", "action_type": "kv.fetch", "action_version": "1.0", "payload": {"session_id": "next"}},
        {"action_id": "3", "action_type": "launder", "action_version": "1.0", "payload": {}},
    ]
    said = {"protocol_version": "1", "message_id": "m", "actions": actions}
    answer = http.post("/v1/completions", json={"prompt": "x", "kv_hints": said}).json()["kedge"]
    assert [one["outcome"] for one in answer["actions"]] == ["applied", "deferred", "rejected"]
    assert served.engine.requests[-1].turn == TurnHints(keep_for=60.0, expects={"next": 0.0})
    assert 'dialect="kv_hints",model_name="kedge-nano",reason="unsupported",tenant="default"} 1.0' in (
        http.get("/metrics").text
    )


@pytest.mark.parametrize("case", with_other_ids(MODEL))
def test_of_several_ids_of_a_coding_client_one_is_the_session(told: Talking, case: str) -> None:
    path, body, headers, session = with_other_ids(MODEL)[case]
    events(f"{told.served.url}{path}", body, headers)
    assert (told.request().turn.session, told.request().run) == (session, session) and told.request().is_plain


Outcomes = dict[tuple[str, str], str]


def advised(http: httpx.Client, body: dict[str, Any]) -> Outcomes:
    """What becomes of hints without a prompt, by their ids and the sessions that they are about."""
    answer = http.post("/v1/hints", json=body)
    assert answer.status_code == 200, answer.text
    actions = answer.json()["actions"]
    assert all(one["reason"] for one in actions)
    return {(one["action_id"], one.get("session", "")): one["outcome"] for one in actions}


def test_every_hint_without_a_prompt_gets_an_outcome() -> None:
    """The echo engine follows no sessions; what is said of runs is the server's."""
    said = {"session": "s", "keep_for": 5, "expects": {"t": None}, "run": "r", "steps": {"a": 1}, "seq": 4}
    with EchoEngine() as engine, serving(engine) as running, running.http() as http:
        no_session = {("keep_for", ""): "rejected", ("expects", "t"): "rejected"}
        assert advised(http, {"kedge": said}) == {("steps", ""): "applied", **no_session}
        assert advised(http, {"kedge": said})["steps", ""] == "rejected", "no newer one than before"
        assert advised(http, {"kedge": {"steps": {"a": 1}}}) == {("steps", ""): "rejected"}
        assert advised(http, {"kedge": {"run": "r", "final": True}}) == {("final", ""): "applied"}
        assert advised(http, {}) == {}
        advised(http, {"kedge": {"session": "fresh", "keep_for": 1}})
        spoken(http, "fresh")
        runs = running.service.client_runs.by_tenant[TenantId("default")]
        assert engine.requests[-1].run == "fresh" and not runs, "sessions take no room of runs"
        spoken(http, "planned", agent="a", steps={"b": 1})
        spoken(http, "planned", agent="b")
        assert [(key.run_id, [*one.called]) for key, one in runs.items()] == [("planned", ["a", "b"])]
        assert advised(http, {"kedge": {"session": "planned", "final": True}}) == {("final", ""): "rejected"}
        assert not runs


HOSTILE: dict[str, Any] = {
    "session": "x" * 257,
    "keep_for": -1,
    "returns_in": "soon",
    "expects": {str(at): 1 for at in range(65)},
    "steps": [1],
    "seq": 1.5,
    "final": "perhaps",
    "workflow": 5,
    "fixed_tokens": 9,
    "pick": "x",
    "mood": 1,
}


def test_values_that_are_not_accepted_are_named_and_change_nothing(http: httpx.Client) -> None:
    told = http.post("/v1/hints", json={"kedge": HOSTILE}).json()["actions"]
    assert {one["outcome"] for one in told} == {"rejected"}
    reasons = {one["action_id"]: one["reason"] for one in told}
    assert reasons.keys() == HOSTILE.keys()
    assert reasons["keep_for"] == "must be a number of seconds from 0 on" and "256 characters" in reasons["session"]
    many = {f"field {at}": 1 for at in range(5000)}
    assert len(advised(http, {"kedge": many})) < 30, "an answer is bounded"
    assert advised(http, {"kedge": [HOSTILE]}) == {}


@pytest.fixture(scope="module")
def local() -> Iterator[Served]:
    with engine_of(tiny_model("llama")) as engine, serving(engine) as running:
        yield running


def spoken(http: httpx.Client, session: str, **kedge: object) -> None:
    body = {"prompt": list(range(3, 67)), "max_tokens": 2, "kedge": {"session": session, **kedge}}
    assert http.post("/v1/completions", json=body).status_code == 200


def test_what_is_said_of_sessions_stands_in_the_embedded_engine(local: Served) -> None:
    with local.http() as http:
        said = {"kedge": {"session": "mine", "keep_for": 7200, "returns_in": 2}}
        assert advised(http, said) == {("keep_for", ""): "deferred", ("returns_in", ""): "rejected"}
        spoken(http, "mine")
        assert advised(http, said) == {("keep_for", ""): "clipped", ("returns_in", ""): "applied"}
        assert advised(http, {"kedge": {"expects": {"mine": 1, "else": 1}}}) == {
            ("expects", "mine"): "applied",
            ("expects", "else"): "rejected",
        }
        assert advised(http, {"kedge": {"session": "mine", "final": True}}) == {("final", ""): "applied"}
        assert advised(http, {"kedge": {"expects": {"mine": 1}}}) == {("expects", "mine"): "rejected"}


def test_actions_without_a_prompt_have_the_outcomes_that_the_engine_gives(local: Served) -> None:
    def action(name: str, kind: str, **payload: object) -> dict[str, object]:
        return {"action_id": name, "action_type": kind, "payload": payload}

    with local.http() as http:
        spoken(http, "known")
        outcomes = {
            "keep": (action("keep", "retain", duration=60), "applied"),
            "first": (action("first", "prefetch", session_id="known"), "applied"),
            "second": (action("second", "kv.fetch@1.0", session_id="nobody"), "rejected"),
            "third": (action("third", "share"), "applied"),
            "fourth": (action("fourth", "launder"), "rejected"),
        }
        kinds = [asked for asked, _ in outcomes.values()]
        found = advised(http, {"session_id": "known", "kv_hints": {"actions": kinds}})
        own = {name: outcome for (name, _), outcome in found.items() if name not in ("keep_for", "expects")}
        assert own == {name: outcome for name, (_, outcome) in outcomes.items()}
        assert advised(http, {"session_id": "nobody", "kv_hints": {"actions": kinds[:1]}})["keep", ""] == "deferred"
        long = {"actions": [action("pin", "pin")]}
        assert advised(http, {"session_id": "known", "kv_hints": long})["pin", ""] == "clipped"


def test_no_tenant_speaks_for_anothers_sessions() -> None:
    keys = load_keys(None, f"victim:{hashed('v')},spy:{hashed('s')}", LimitSettings())
    with engine_of(tiny_model("llama")) as engine, serving(engine, keys=keys) as running:
        with running.http("v") as victim, running.http("s") as spy:
            spoken(victim, "mine")
            said = {"kedge": {"expects": {"mine": None}}}
            assert advised(spy, said) == {("expects", "mine"): "rejected"}
            assert advised(victim, said) == {("expects", "mine"): "applied"}
        assert httpx.post(f"{running.url}/v1/hints", json=said).status_code == 401


def test_hints_without_a_prompt_have_a_limit_of_their_own() -> None:
    keys = KeyRing({}, LimitSettings(tokens_per_minute=1, hints_per_minute=10))
    with EchoEngine() as engine, serving(engine, keys=keys) as running, running.http() as http:
        allowed = keys.of_headers({}).allowed_hints
        allowed.clock = lambda: 0.0  # time stands still
        for used in (3, 6, 9, 12):
            said = {"run": "r", "steps": {"a": used - 1, "b": 1}}
            assert http.post("/v1/hints", json={"kedge": said}).status_code == 200
            assert allowed.full_at == used * 60 / 10
        refused = http.post("/v1/hints", json={"kedge": {"run": "r", "final": True}})
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert refused.headers["retry-after"] == "18"
        assert len(engine.forecasts) == 4, "what is refused changes nothing"
        plain, told = {"prompt": "x", "kedge": {"run": "r"}}, {"prompt": "x", "kedge": {"run": "s", "steps": {"a": 1}}}
        assert http.post("/v1/completions", json=plain).status_code == 200
        assert http.post("/v1/completions", json=told).status_code == 429, "its forecast is of the same kind"
        allowed.full_at = 0.0
        assert http.post("/v1/completions", json=told).status_code == 429, "its tokens are used up"
        assert (len(engine.forecasts), allowed.full_at) == (4, 0.0)
        keys.of_headers({}).allowed_tokens.full_at = 0.0
        assert http.post("/v1/completions", json=told).status_code == 200
        assert (len(engine.forecasts), allowed.full_at) == (5, 60 / 10)
