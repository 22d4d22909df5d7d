"""Translation by cost on vLLM: where computing is faster, nothing is translated or learned."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kedge.reuse.costs import LinearCost
from kedge.reuse.planner import CHEAPER
from tests.integrations.vllm.conftest import Driver, receipt
from tests.integrations.vllm.lane_prompts import ONE, SETTINGS, ask, lane_engine

DEAR, CHEAP = LinearCost((1.0, 1.0)), LinearCost((1e-9, 1e-9))


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[Driver]:
    extra = {**SETTINGS, "planner": {"recompute_head": 2}}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LinearCost, "observe", lambda *_: None)
        with lane_engine(tiny_llama, asynchronous=False, extra=extra) as built:
            yield built


def test_passes_and_writes_are_measured(tiny_llama: Path) -> None:
    with lane_engine(tiny_llama, asynchronous=False) as built:
        costs = built.worker._learner._costs
        assert costs._passes._observed > 10 and costs._translations._observed >= 6
        before = costs._translations._observed
        assert receipt(ask(built, ONE))["tokens"]["translated"]
        assert costs._translations._observed == before + 1


def test_what_is_cheaper_to_compute_is_computed_until_translation_pays_again(engine: Driver) -> None:
    learned = engine.worker._learner.captured
    for translations in (CHEAP, DEAR, DEAR, CHEAP):
        engine.worker._learner._costs._translations = translations  # whatever is measured
        engine.reset()
        found = receipt(ask(engine, ONE))
        assert bool(found["tokens"]["translated"]) is (translations is CHEAP)
        if translations is DEAR:
            assert {miss["reason"] for miss in found["misses"]} == {CHEAPER} and not learned
