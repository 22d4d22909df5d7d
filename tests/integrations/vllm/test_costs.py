"""Translation by cost on vLLM: where computing is faster, nothing is translated, learned or waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kedge.integrations.vllm.plugin.translations import LOSING, TRIED  # noqa: E402
from kedge.reuse.costs import LinearCost  # noqa: E402
from kedge.reuse.planner import CHEAPER  # noqa: E402
from tests.integrations.vllm.conftest import Driver, receipt  # noqa: E402
from tests.integrations.vllm.lane_prompts import ONE, OTHER, SETTINGS, ask, hints, lane_engine, tokens  # noqa: E402

DEAR, CHEAP = LinearCost((1.0, 1.0)), LinearCost((1e-9, 1e-9))


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[Driver]:
    extra = {**SETTINGS, "planner": {"recompute_head": 2}}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LinearCost, "observe", lambda *_: None)
        with lane_engine(tiny_llama, asynchronous=False, extra=extra) as built:
            yield built


def price(engine: Driver, translations: LinearCost) -> None:
    """Make translations cost so much, whatever is measured."""
    engine.worker._learner.writes._costs._translations = translations


def times_asked(engine: Driver, number: int) -> tuple[int, Any]:
    """How often the worker is asked about a prompt, and its receipt."""
    learner, asked = engine.worker._learner, []
    with pytest.MonkeyPatch.context() as patched:
        judge = learner.judge
        patched.setattr(learner, "judge", lambda query: asked.append(query) or judge(query))
        done = engine.ask(tokens(number), 2, hints(number))
    return len(asked), receipt(done)


def test_passes_and_writes_are_measured(tiny_llama: Path) -> None:
    with lane_engine(tiny_llama, asynchronous=False) as built:
        costs = built.worker._learner.writes._costs
        assert costs._passes._observed > 10 and costs._translations._observed >= 6
        before = costs._translations._observed
        assert receipt(ask(built, ONE))["tokens"]["translated"]
        assert costs._translations._observed == before + 1


def test_what_is_cheaper_to_compute_is_not_asked_about_again(engine: Driver) -> None:
    price(engine, CHEAP)
    assert receipt(ask(engine, ONE))["tokens"]["translated"]
    price(engine, DEAR)
    engine.reset()
    asked, learned = [], engine.worker._learner._captured
    for _ in range(TRIED + 1):
        engine.reset()
        times, found = times_asked(engine, ONE)
        assert {miss["reason"] for miss in found["misses"]} == {CHEAPER} and not found["tokens"]["translated"]
        assert not learned
        asked.append(times)
    assert asked == [1] + [0] * (TRIED - 1) + [1]


def test_translation_comes_back_when_it_pays_again(engine: Driver) -> None:
    price(engine, CHEAP)
    found = []
    for _ in range(2 * TRIED):
        engine.reset()
        found.append(bool(receipt(ask(engine, ONE))["tokens"]["translated"]))
    assert found == [False] * (2 * TRIED - 1) + [True]


def test_all_that_is_done_for_a_workflow_counts_in_its_balance(engine: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, spent = engine.worker._learner, Counter[str]()

    def at_work(name: str) -> None:
        inner = getattr(learner, name)

        def counted(*args: Any) -> Any:
            before = sum(spent.values())
            found = inner(*args)
            assert sum(spent.values()) > before, f"{name} was not charged"
            spent[name] += 1
            return found

        monkeypatch.setattr(learner, name, counted)

    monkeypatch.setattr(learner._balances, "spend", lambda *_, **__: spent.update(charged=1))
    for name in ("capture", "_observe"):
        at_work(name)
    engine.reset()
    engine.ask(tokens(0), 4, hints(0, agent="pupil", produces="pupil@0"))
    assert spent["capture"] >= 2 and spent["_observe"] == 4, "a prompt with two values and a text, and an answer"


def test_a_workflow_that_loses_time_is_left_alone_run_by_run(engine: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    price(engine, CHEAP)
    monkeypatch.setattr(engine.worker._learner._balances, "is_losing", lambda _: True)
    engine.reset()
    assert receipt(ask(engine, ONE))["tokens"]["translated"], "the first to hear of it"
    for _ in range(2):
        engine.reset()
        times, found = times_asked(engine, OTHER)
        assert not times and [miss["reason"] for miss in found["misses"]] == [LOSING]
