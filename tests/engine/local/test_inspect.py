"""Looking into the engine: what is told of some tenants is theirs, and right."""

from __future__ import annotations

from kedge.engine.echo import EchoEngine
from kedge.engine.local.engine import LocalEngine
from kedge.types import (
    AgentId,
    GenerateRequest,
    Namespace,
    ReuseMode,
    RunId,
    SampleId,
    SamplingParams,
    Segment,
    TenantId,
)
from tests.engine.local.conftest import engine_of, tiny_model
from tests.engine.local.test_translation import SETTINGS, tokens

ACME, OTHER = Namespace(TenantId("acme")), Namespace(TenantId("other"))
SIZE = 16


def request(space: Namespace, seed: int, reuse: ReuseMode = ReuseMode.TRANSLATE) -> GenerateRequest:
    return GenerateRequest(
        (
            Segment(tokens(1, 40), "p0"),
            Segment(tokens(seed, 24), "user_question", SampleId.parse(f"input@{seed}")),
            Segment(tokens(2, 10), "p1"),
        ),
        SamplingParams(2, ignore_eos=True),
        reuse,
        tenant=space.tenant,
        run=RunId(f"run-{seed}"),
        agent=AgentId("solver"),
    )


def serve(engine: LocalEngine, *requests: GenerateRequest) -> None:
    for one in requests:
        engine.submit(one).result(60)
        engine.wait_idle(60)


def test_only_an_engine_with_insides_can_be_looked_into(engine: LocalEngine) -> None:
    assert engine.inspect() and engine.inspect_tenants(lambda _: True, [])
    with EchoEngine() as echo:
        assert not echo.inspect() and not echo.inspect_tenants(lambda _: True, [])


def test_prompts_are_told_by_tenant_and_by_full_blocks() -> None:
    with engine_of(tiny_model("llama"), block_size=SIZE) as engine:
        asked = request(ACME, 3, ReuseMode.EXACT)
        serve(engine, asked)
        held = engine.inspect_tenants(
            lambda space: space == ACME,
            [(ACME, asked.tokens), (ACME, asked.tokens[:40]), (OTHER, asked.tokens), (ACME, tokens(9, 40))],
        )
    assert [one["device"] for one in held["prompts"]] == [64, 32, 0, 0]
    assert {one["host"] for one in held["prompts"]} == {0}
    assert held["pools"] == []


def test_pools_are_told_to_whom_they_belong() -> None:
    with engine_of(tiny_model("llama"), **SETTINGS) as engine:
        serve(engine, *(request(ACME, seed) for seed in (3, 4, 5)), request(OTHER, 6))
        mine, theirs, nobodys = (
            engine.inspect_tenants(lambda space, name=name: space == name, [])["pools"]
            for name in (ACME, OTHER, Namespace(TenantId("acm")))
        )
        everything = engine.inspect()["anchors"]
    (pool,), (foreign,) = mine, theirs
    assert (pool["workflow"], pool["placeholder"], pool["sites"]) == ("", "user_question", 1)
    assert pool["anchors"] + foreign["anchors"] == everything["anchors"]
    assert pool["nbytes"] + foreign["nbytes"] == everything["nbytes"]
    assert (pool["uses"] > 0) == (everything["used"] > 0)
    assert nobodys == []
    assert "tenant" not in pool
