"""Workflow-aware caching inside vLLM: evictions, loads and waiting, without a change of any answer."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kedge.types import AgentKey
from tests.integrations.vllm.conftest import BLOCK, Answers, Driver, driver, prompt, receipt, turn_of

AGENTS = 10
FIXED = 8 * BLOCK
FIXED_PROMPTS = [prompt(FIXED, 1000 + agent) for agent in range(AGENTS)]


def hints(agent: int, **more: Any) -> dict[str, Any]:
    return turn_of(agent, FIXED, AGENTS, **more)


def call(agent: int, turn: int) -> list[int]:
    return FIXED_PROMPTS[agent] + prompt(BLOCK + 8, 10_000 * turn + agent)


@pytest.fixture(scope="module")
def stock(tiny_llama: Path) -> Answers:
    """Answers of vLLM without the plug-in."""
    with driver(tiny_llama, plugged=False, num_gpu_blocks_override=41) as plain:
        answers = {(agent, turn): plain.answer(call(agent, turn)) for turn in range(3) for agent in range(AGENTS)}
        hits = plain.ask(call(0, 0)).num_cached_tokens
    assert hits == 0, "the cycle should not fit"
    return answers


@pytest.fixture(scope="module", params=["make_scheduler", "AsyncStepScheduler"])
def small(tiny_llama: Path, stock: object, request: pytest.FixtureRequest) -> Iterator[Driver]:  # noqa: ARG001 - one engine at a time: stock goes first
    """Room for about four of the ten agents, and for all of them on the host.

    On a CPU vLLM switches asynchronous scheduling off. Its scheduler, which counts tokens ahead of the device, can be
    named all the same; what is not run here is that a step is scheduled before the one before it has ended.
    """
    tiers = {"host_memory": "100 blocks"}
    with driver(
        tiny_llama,
        extra={"tiers": tiers},
        num_gpu_blocks_override=41,
        scheduling_policy="priority",
        scheduler_cls=f"kedge.integrations.vllm.plugin.scheduler.{request.param}",
    ) as built:
        prefetcher = built.side.loads.prefetcher
        prefetcher.jobs, prefetcher.window = 1, 1.0
        yield built


@pytest.fixture
def flow(small: Driver) -> Driver:
    """The engine without what earlier tests have left."""
    small.reset()
    return small


def cycled(flow: Driver, stock: Answers) -> float:
    """The share of the fixed prompts that is found by three turns of all agents, who answer as stock."""
    hits = 0
    for turn in range(3):
        for agent in range(AGENTS):
            output = flow.ask(call(agent, turn), kedge=hints(agent))
            assert list(output.outputs[0].token_ids) == stock[agent, turn]
            hits += min(output.num_cached_tokens, FIXED) if turn else 0
            flow.side.queue.check_integrity()
    return hits / (2 * AGENTS * FIXED)


def test_a_cycle_hits_what_lru_would_have_evicted(flow: Driver, stock: Answers) -> None:
    assert cycled(flow, stock) > 0.9
    flow.check_rest()
    totals = flow.side.totals()
    assert totals["prefetches_completed"] > 0 and totals["evictions_varying"] > 0 and totals["blocks_offloaded"] == 80


def test_eviction_alone_keeps_the_agents_that_run_next(
    flow: Driver, stock: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow.side, "loads", None)
    assert cycled(flow, stock) >= 3 / 9, "room for four of ten, by step: 3/9; least recently used: 0"


def resident(flow: Driver, agent: int) -> int:
    """Blocks of an agent's fixed prompt that are on the device."""
    from kedge.integrations.vllm.plugin.block_pools import leading_blocks

    key = next(key for key in flow.side.prompts.prompts if key.agent == f"a{agent}")
    return len(leading_blocks(flow.pool, flow.side.prompts.prompts[key]))


def far(agent: int, **more: Any) -> dict[str, Any]:
    """A forecast by which no other agent comes soon: nothing is prefetched."""
    steps = {f"a{other}": 0 if other == agent else 5 + other for other in range(AGENTS)}
    return {"run": "r", "agent": f"a{agent}", "fixed_tokens": FIXED, "steps": steps, **more}


def evicted(flow: Driver) -> int:
    """Runs enough agents that one of them is on the host only; which."""
    for agent in range(6):
        flow.ask(call(agent, 0), kedge=far(agent))
    return next(agent for agent in range(6) if not resident(flow, agent))


@pytest.mark.parametrize("run", ["r", "another"])
def test_the_next_agent_is_loaded_while_the_engine_is_idle(flow: Driver, run: str) -> None:
    """Also of a new run, which knows the fixed prompts of older ones."""
    target = evicted(flow)
    flow.ask(call(5, 1), kedge=hints(5, run=run, steps={"a5": 0, f"a{target}": 1}))
    assert resident(flow, target) == FIXED // BLOCK
    before = flow.side.totals()["blocks_loaded"]
    output = flow.ask(call(target, 1), kedge=far(target))
    assert output.num_cached_tokens == FIXED and flow.side.totals()["blocks_loaded"] == before
    assert receipt(output)["tokens"]["device"] == FIXED


def test_a_request_waits_for_its_load_and_others_go_first(
    flow: Driver, stock: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = evicted(flow)
    monkeypatch.setattr(flow.worker._copier, "_throttle", 0.02)
    loading = flow.add(call(target, 1), kedge=far(target))
    other = flow.add(prompt(50, 7))
    flow.run(until=lambda: other in flow.finished)
    assert loading not in flow.finished
    flow.run()
    found = receipt(flow.finished[loading])["tokens"]
    assert found == {"device": 0, "host": FIXED, "translated": 0, "computed": BLOCK + 8}
    assert list(flow.finished[loading].outputs[0].token_ids) == stock[target, 1]
    flow.check_rest()


def test_an_abort_during_a_load_leaks_nothing(flow: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    target = evicted(flow)
    monkeypatch.setattr(flow.worker._copier, "_throttle", 0.02)
    loading = flow.add(call(target, 1), kedge=far(target))
    flow.run(until=lambda: flow.side.loads.tier.busy)
    flow.engine.abort_request([loading])
    flow.run()
    assert resident(flow, target) == FIXED // BLOCK, "what was on its way still comes"
    flow.check_rest()


def test_a_failed_copy_is_computed(flow: Driver, stock: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    target = evicted(flow)

    def fail(*_: object) -> None:
        raise RuntimeError("the bus is gone")

    monkeypatch.setattr(flow.worker._copier, "_copy", fail)
    output = flow.ask(call(target, 1), kedge=far(target))
    assert list(output.outputs[0].token_ids) == stock[target, 1]
    assert receipt(output)["tokens"]["computed"] == FIXED + BLOCK + 8
    assert flow.side.totals()["failed_copies"] > 0
    flow.check_rest()


def agents(flow: Driver) -> list[AgentKey]:
    """The agents whose next run is known."""
    return [key for key in flow.side.owners.next_runs if isinstance(key, AgentKey)]


def test_an_ended_run_protects_nothing(flow: Driver) -> None:
    for agent in range(4):
        flow.ask(call(agent, 0), kedge=far(agent, run="short", final=agent == 3))
    assert "short" not in {key.run_id for key in agents(flow)}
    flow.check_rest()


def test_old_forecasts_expire_without_a_host_tier(flow: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow.side, "loads", None)
    flow.answer(call(0, 0), kedge=hints(0))
    assert len(agents(flow)) >= AGENTS
    later = time.monotonic() + 601
    monkeypatch.setattr("kedge.integrations.vllm.plugin.owners.time", SimpleNamespace(monotonic=lambda: later))
    flow.answer(call(1, 0))
    assert not agents(flow)


def test_reuse_can_be_switched_off(flow: Driver, stock: Answers) -> None:
    flow.ask(call(0, 0), kedge=far(0))
    output = flow.ask(call(0, 1), kedge=far(0, reuse="off"))
    assert receipt(output)["tokens"]["computed"] == FIXED + BLOCK + 8 and output.num_cached_tokens == 0
    assert list(output.outputs[0].token_ids) == stock[0, 1]


def test_waiting_requests_go_by_their_steps(flow: Driver) -> None:
    order: list[str] = []
    names = {}
    for step in (5, 1, 3):
        kedge = {"run": f"run{step}", "agent": "a", "steps": {"a": step}}
        names[flow.add(prompt(900, step), count=1, kedge=kedge)] = step
    while len(order) < 3:
        flow.step()
        order += [name for name in names if name in flow.finished and name not in order]
    assert [names[name] for name in order] == [1, 3, 5]
