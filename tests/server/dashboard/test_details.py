"""From a run to its calls, their receipts and, where allowed, their texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from kedge.engine.echo import EchoEngine
from kedge.errors import ConfigError
from kedge.server.dashboard import history as history_module
from kedge.server.dashboard.history import History, text_of
from kedge.server.tenancy import _of_section, hashed, load_keys
from kedge.settings import LimitSettings, ServerSettings
from kedge.types import RequestId, TenantId
from tests.server.conftest import Served, serving
from tests.server.dashboard.test_history import ACME, Clock, agent_of, answer, completion, receipt, request
from tests.server.dashboard.test_routes import chat, state


def test_a_run_has_its_calls_wherever_they_are() -> None:
    history = History(Clock())
    answer(history, request(1, "a", run="r"), receipt(device=2, computed=3))
    history.submitted(request(2, "b", run="r"))
    history.ended(ACME, RequestId("r2"))
    history.submitted(request(3, "c", run="r"))
    answer(history, request(4, "other", run="s"), receipt(computed=5))
    first, second = (run["number"] for run in reversed(history.state(ACME)["runs"]))
    found = history.run(ACME, first)
    assert found is not None
    assert [(one["agent"], one["state"], "tokens" in one) for one in found["calls"]] == [
        ("a", "done", True),
        ("b", "stopped", False),
        ("c", "waiting", False),
    ]
    assert found["calls"][0]["parts_ms"] == {}
    assert [one["agent"] for one in (history.run(ACME, second) or {})["calls"]] == ["other"]
    assert history.run(ACME, 99) is None
    assert history.run(TenantId("other"), first) is None


def test_a_time_is_told_with_the_most_requests_in_flight_meanwhile() -> None:
    history = History(Clock())
    for number in (1, 2):
        history.submitted(request(number))
    history.begun(ACME, RequestId("r1"))
    history.submitted(request(3))
    for number in (1, 2, 3):
        history.ended(ACME, RequestId(f"r{number}"), completion(receipt(computed=5)))
    answer(history, request(4), receipt(computed=5))
    state = history.state(ACME)
    loads = {one["number"]: (one["ttft_load"], one["total_load"]) for one in state["receipts"]}
    assert loads == {1: (2, 3), 2: (3, 3), 3: (3, 3), 4: (1, 1)}
    assert agent_of(state)["ttft_ms"]["computed"]["load"] == 2.5


def test_texts_are_kept_of_those_who_allow_it_and_go_with_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(Clock(), keeps_texts=lambda tenant: tenant == ACME)
    for tenant in (ACME, TenantId("other")):
        answer(history, request(1, tenant=tenant), receipt(device=2, computed=3))
    (_, asked, done), (_, theirs, _) = history.call(ACME, 1) or (), history.call(TenantId("other"), 1) or ()
    assert theirs is None and asked and done
    with EchoEngine() as engine:
        text = text_of(asked, done, engine.tokenizer)
    assert text["answer"] == "a"
    pieces = [(one["segment"], one["source"], len(one["text"])) for one in text["prompt"]]
    assert pieces == [("p0", "device", 2), ("p0", "computed", 1), ("p1", "computed", 2)]
    monkeypatch.setattr(history_module, "MAX_TEXT_TOKENS", 20)
    for number in range(2, 8):
        answer(history, request(number), receipt(computed=5))
    kept = [call.number for call in history._tenants[ACME].calls if call.request]
    assert kept == [5, 6, 7]


def one_call(running: Served, key: str = "none") -> tuple[dict[str, Any], dict[str, Any]]:
    """A run of one call, and that call, as the page fetches them."""
    with running.http(key) as http:
        chat(http, kedge={"run": "mine", "agent": "a"})
        (run,) = state(http)["runs"]
        found = http.get(f"/v1/dashboard/runs/{run['number']}").json()
        return found, http.get(f"/v1/dashboard/calls/{found['calls'][0]['number']}").json()


@pytest.mark.parametrize("kept", [False, True])
def test_from_a_run_to_its_call_and_where_allowed_its_text(kept: bool) -> None:
    with EchoEngine() as engine, serving(engine, ServerSettings(keep_texts=kept)) as running:
        run, call = one_call(running)
    assert (run["status"], len(run["calls"])) == ("running", 1)
    assert {"misses", "parts_ms", "ttft_load", "total_load"} <= call.keys()
    assert call["keeps_texts"] is kept
    assert bool(call["text"]) is kept
    if kept:
        assert "hello" in "".join(piece["text"] for piece in call["text"]["prompt"])
        assert {piece["source"] for piece in call["text"]["prompt"]} == {"computed"}
        assert call["text"]["answer"]


def test_a_tenant_chooses_for_itself_and_sees_no_others_calls(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        f'[tenants.open]\nkeys = ["{hashed("key-a")}"]\nkeep_texts = true\n'
        f'[tenants.shy]\nkeys = ["{hashed("key-b")}"]\nkeep_texts = false\n'
    )
    with EchoEngine() as engine, serving(engine, keys=load_keys(file, None, LimitSettings())) as running:
        assert one_call(running, "key-a")[1]["text"]
        assert not one_call(running, "key-b")[1]["text"]
        with running.http("key-b") as http:
            chat(running.http("key-a"))
            assert [http.get(f"/v1/dashboard/{path}").status_code for path in ("runs/2", "calls/2", "calls/x")] == [
                404,
                404,
                400,
            ]
        assert httpx.get(running.url + "/v1/dashboard/runs/1").status_code == 401


def test_a_wrong_choice_is_named() -> None:
    with pytest.raises(ConfigError, match=r"tenants.a.keep_texts='yes'"):
        list(_of_section("tenants.a", "a", {"keys": [hashed("k")], "keep_texts": "yes"}, LimitSettings()))
