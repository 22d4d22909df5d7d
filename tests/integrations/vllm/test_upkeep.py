"""What the plug-in's scheduler puts off is done while a pass runs, and before anything that depends on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm.conftest import BLOCK, SCHEDULING, Driver, driver, prompt

pytest.importorskip("vllm", reason="vLLM is not installed")

from kedge.integrations.vllm.plugin.settings import SCHEDULER


@pytest.fixture(scope="module", params=SCHEDULING, ids=["sync", "async"])
def engine(tiny_llama: Path, request: Any) -> Iterator[Driver]:
    with driver(tiny_llama, scheduler_cls=SCHEDULER, async_scheduling=request.param) as built:
        yield built


def hints(run: str) -> dict[str, Any]:
    return {"run": run, "agent": "a", "fixed_tokens": 2 * BLOCK, "steps": {"a": 3, "b": 1}}


def test_forecasts_and_sessions_are_looked_after_in_the_pass(engine: Driver) -> None:
    side = engine.side
    engine.add(prompt(3 * BLOCK, 1), kedge=hints("one"))
    assert side.upkeep.is_open and side.upkeep._tasks and not side.prompts.steps
    engine.step()
    assert not side.upkeep._tasks
    assert {(key.run_id, key.agent): one.steps for key, one in side.prompts.steps.items()} == {
        ("one", "a"): 3.0,
        ("one", "b"): 1.0,
    }
    engine.run()
    (agent,) = side.prompts.prompts
    assert (agent.run_id, agent.agent) == ("one", "a"), "its blocks were labelled when it ended"


def test_a_request_that_ends_before_its_pass_leaves_what_it_said(engine: Driver) -> None:
    name = engine.add(prompt(3 * BLOCK, 2), kedge=hints("two"))
    engine.engine.abort_request([name])
    assert not engine.side.upkeep._tasks
    assert any(key.run_id == "two" for key in engine.side.prompts.steps)
    engine.run()


def test_with_a_host_tier_nothing_is_put_off(tiny_llama: Path) -> None:
    """Loads of the same step depend on forecasts."""
    with driver(tiny_llama, extra={"tiers": {"host_memory": "16 blocks"}}, scheduler_cls=SCHEDULER) as hosted:
        hosted.add(prompt(3 * BLOCK, 1), kedge=hints("one"))
        assert not hosted.side.upkeep.is_open and hosted.side.prompts.steps
        hosted.run()
