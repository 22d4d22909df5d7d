"""The guard over HTTP: a tenant's own agents, modes per call and run, receipts and metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from kedge.engine.common.guarding.guarded_calls import GuardedCalls
from kedge.engine.echo import EchoEngine
from kedge.engine.local.engine import LocalEngine
from kedge.engine.process.engine import ProcessEngine
from kedge.guard import DecisionKind
from kedge.reuse.guard.comparison import DecisionComparison
from kedge.reuse.guard.guard import QualityGuard
from kedge.server.metrics import guard_families
from kedge.server.tenancy import hashed, load_keys
from kedge.settings import GuardSettings, LimitSettings
from kedge.types import (
    AgentId,
    GenerateRequest,
    Namespace,
    ReuseMode,
    SampleId,
    Segment,
    TenantId,
    Tokens,
    WorkflowId,
)
from tests.server.conftest import serving

CLEAN, CHANGED = (
    DecisionComparison({DecisionKind.FAR: False}, 0.0),
    DecisionComparison({DecisionKind.FAR: True}, 1.0),
)
FLOW: dict[str, Any] = {
    "name": "pair",
    "agents": [
        {"id": "first", "user": "Q: {user_question}"},
        {"id": "last", "user": "Q: {user_question} A: {agent_first_current}"},
    ],
}
EMPTY = {"object": "guard", "mode": None, "max_changed": None, "agents": []}


class Guarded(EchoEngine):
    """An engine with records of two tenants, which remembers what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.guard, self.asked = QualityGuard(GuardSettings()), list[GenerateRequest]()
        self._calls = GuardedCalls(self.submit, GuardSettings())
        for tenant, seen in (("acme", CLEAN), ("other", CHANGED)):
            value = Segment((1, 2), "user_question", SampleId.parse("input_user_question@0"))
            names = {"tenant": TenantId(tenant), "workflow": WorkflowId("w"), "agent": AgentId(f"spy-of-{tenant}")}
            self.guard.observe(GenerateRequest((value,), reuse=ReuseMode.TRANSLATE, **names), (value.name,), seen)

    def submit(self, request: GenerateRequest) -> Any:
        self.asked.append(request)
        return super().submit(request)

    def _figures(self, owns: Callable[[Namespace], bool]) -> dict[str, Any]:
        totals = {"suspicions": self.guard.suspicions, "breaches": self.guard.breaches}
        return {**self._calls.stats(), **totals, "agents": self.guard.stats(owns)}

    def inspect(self) -> Mapping[str, Any]:
        return {"cache": {}, "guard": self._figures(lambda _: True)}

    def inspect_tenants(
        self, owns: Callable[[Namespace], bool], prompts: Sequence[tuple[Namespace, Tokens]]
    ) -> Mapping[str, Any]:
        return {"prompts": list(prompts), "pools": [], "guard": self._figures(owns)}


def test_a_tenant_sees_its_own_agents_only() -> None:
    keys = load_keys(None, f"acme:{hashed('key-a')},third:{hashed('key-c')}", LimitSettings())
    with Guarded() as engine, serving(engine, keys=keys) as running:
        with running.http("key-a") as acme, running.http("key-c") as third:
            mine, none = acme.get("/v1/guard").json(), third.get("/v1/guard").json()
            assert "kedge:guard" not in acme.get("/metrics").text
        assert running.http("wrong").get("/v1/guard").status_code == 401
    (record,) = mine["agents"]
    assert (record["agent"], record["checks"], record["state"]) == ("spy-of-acme", 1, "shadow")
    assert mine.keys() == EMPTY.keys() and "other" not in str(mine)
    assert none["agents"] == [] and none["mode"] == "on"


def test_metrics_count_states_without_names() -> None:
    with Guarded() as engine, serving(engine) as running, running.http() as http:
        text = http.get("/metrics").text
    assert 'kedge:guard_placeholders{state="shadow"} 2.0' in text
    assert 'kedge:guard_checks_total{outcome="dropped"} 0.0' in text
    assert "kedge:guard_withheld 1.0" in text and "kedge:guard_suspicions_total 1.0" in text
    assert "kedge:guard_breaches_total 0.0" in text and "spy" not in text
    assert "kedge:fidelity_proved 0.0" in text


def test_metrics_have_the_worst_mean_of_proved_agents_and_its_bound() -> None:
    proved = {"rung": "moved", "mean": 0.001, "bound": None}
    found = [proved, {**proved, "mean": 0.0005, "bound": 0.002}, {"rung": "", "mean": None, "bound": None}, None]
    agents = [{"state": "on", "withheld": False, "fidelity": one} for one in found]
    figures = {
        "agents": agents,
        "checks_done": 0,
        "checks_dropped": 0,
        "checked_tokens": 0,
        "suspicions": 0,
        "breaches": 0,
    }
    samples = {one.name: one.value for family in guard_families(figures) for one in family.samples}
    shown = [samples[f"kedge:fidelity_{name}"] for name in ("proved", "mean", "bound")]
    assert shown == [2, 0.001, 0.002]


def test_an_engine_without_a_guard_has_no_records() -> None:
    with EchoEngine() as engine, serving(engine) as running, running.http() as http:
        assert http.get("/v1/guard").json() == EMPTY
        assert "kedge:guard" not in http.get("/metrics").text


def test_an_engine_in_its_own_process_answers_too() -> None:
    with ProcessEngine(LocalEngine) as engine, serving(engine) as running, running.http() as http:
        found = http.get("/v1/guard").json()
    assert found["mode"] == "on" and found["agents"] == []


@pytest.mark.parametrize(
    ("field", "own", "asked", "expected"),
    [
        ("guard", None, None, None),
        ("guard", None, "off", "off"),
        ("guard", "shadow", None, "shadow"),
        ("guard", "shadow", "on", "on"),
        ("fidelity", "any", None, math.inf),
        ("fidelity", None, "strict", 0.0003),
        ("fidelity", 0.5, "any", math.inf),
        ("pick", None, None, ""),
        ("pick", "Pick:", None, "Pick:"),
        ("pick", "Pick:", "So:", "So:"),
    ],
)
def test_what_a_call_asks_for_overrides_what_its_agent_has(field: str, own: Any, asked: Any, expected: Any) -> None:
    flow = {**FLOW, "agents": [{**one, field: own} if own else one for one in FLOW["agents"]]}
    with Guarded() as engine, serving(engine) as running, running.http() as http:
        assert http.post("/v1/workflows", json=flow).status_code == 201
        kedge = {"workflow": "pair", "agent": "first", "bindings": {"user_question": "why?"}, field: asked}
        answer = http.post("/v1/chat/completions", json={"messages": [], "kedge": kedge})
        assert answer.status_code == 200, answer.text
        receipt = answer.json()["kedge"]["receipts"][0]
        assert (receipt["guard"], receipt["fidelity"]) == ([], None), "this engine translates nothing"
        assert getattr(engine.asked[-1].guard, "mode" if field == "guard" else field) == expected
        http.post("/v1/workflows/pair/runs", json={"inputs": {"user_question": "why?"}, "stream": True}).read()
        assert field != "pick" or {one.guard.pick for one in engine.asked[1:]} == {own or ""}
        unset = "" if field == "pick" else None
        assert [one[field] for one in http.get("/v1/workflows/pair").json()["agents"]] == [own or unset] * 2


def test_a_runs_mode_is_that_of_agents_without_their_own() -> None:
    first, *others = FLOW["agents"]
    flow = {**FLOW, "agents": [{**first, "guard": "on"}, *others]}
    with Guarded() as engine, serving(engine) as running, running.http() as http:
        http.post("/v1/workflows", json=flow)
        inputs = {"inputs": {"user_question": "why?"}, "guard": "off", "stream": True}
        http.post(f"/v1/workflows/{FLOW['name']}/runs", json=inputs).read()
        modes = {one.agent: one.guard.mode for one in engine.asked}
        assert http.post(f"/v1/workflows/{FLOW['name']}/runs", json={**inputs, "guard": "maybe"}).status_code == 400
    assert modes == {first["id"]: "on", **{one["id"]: "off" for one in others}}


@pytest.mark.parametrize(("field", "bad"), [("guard", "maybe"), ("fidelity", "exactly")])
def test_a_call_with_an_unknown_mode_or_budget_is_refused(field: str, bad: str) -> None:
    with Guarded() as engine, serving(engine) as running, running.http() as http:
        body = {"messages": [{"role": "user", "content": "hi"}], "kedge": {field: bad}}
        refused = http.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400 and f"kedge.{field}" in refused.text and not engine.asked
