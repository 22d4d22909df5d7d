"""The guard in the engine: a tiny model whose anchors predict nothing is caught, and nothing of the checks shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kedge.engine.common.guarding import check
from kedge.engine.common.guarding.guarded_calls import GuardedCalls
from kedge.engine.local.engine import LocalEngine
from kedge.guard import GuardMode, GuardOrders
from kedge.reuse.guard import guard as guard_module
from kedge.reuse.guard.guard import QualityGuard
from kedge.reuse.planner import WITHHELD
from kedge.settings import AnchorSettings, GuardSettings
from kedge.types import Completion, ReuseMode
from tests.engine.local.conftest import engine_of, tiny_model
from tests.engine.local.test_translation import OPEN, request, tokens

EAGER = GuardSettings(share=1.0)


def engine(**guard: object) -> LocalEngine:
    """An engine that translates whatever it has seen once: on a random model that changes most answers."""
    settings = GuardSettings(**{**EAGER.model_dump(), **guard})
    return engine_of(tiny_model("llama"), anchors=AnchorSettings(**OPEN), guard=settings)


@pytest.fixture(scope="module", autouse=True)
def near() -> Iterator[None]:
    """Of the flat distributions of a random model, the likeliest tokens show little."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "FAR", 0.02)
        patch.setattr(guard_module, "SENTINELS", 0)
        yield


def team(engine: LocalEngine, number: int, **changes: Any) -> Completion:
    """A run of two agents that read the same question; the second one's answer."""
    mine = [request(tokens(100 + number, 27), agent=agent, run=f"run-{number}") for agent in ("critic", "solver")]
    for one in mine:
        done = engine.submit(replace(one, **changes)).result(60)
        engine.wait_idle(60)
    engine.end_run(mine[0].run_key)
    return done


def record(engine: LocalEngine, agent: str = "solver") -> dict[str, Any]:
    figures: Any = engine.inspect()["guard"]
    return next((one for one in figures["agents"] if one["agent"] == agent), {})


@pytest.fixture(scope="module")
def caught() -> Iterator[LocalEngine]:
    """An engine whose solver has changed an answer."""
    with engine() as one:
        number = next(n for n in range(20) if team(one, n) and record(one).get("withheld"))
        assert number < 20
        yield one


def test_a_changed_answer_ends_its_agents_translation(caught: LocalEngine) -> None:
    done = team(caught, 50)
    assert done.receipt.translated == 0
    assert WITHHELD in [miss.reason for miss in done.receipt.misses]
    assert [note.placeholder for note in done.receipt.guard] == ["user_question"]


def test_trials_use_nothing_that_was_learned_from_their_own_call(caught: LocalEngine) -> None:
    """With the anchor, or the cached KV, of the call itself every trial would be clean; most are not on this model."""
    before = record(caught)["breaches"]
    for number in range(60, 90):
        team(caught, number)
        if record(caught)["breaches"] > before:
            break
    assert record(caught)["breaches"] > before and record(caught)["withheld"]


def test_after_a_breach_earlier_anchors_are_not_used() -> None:
    with engine() as one:
        breached = next(n for n in range(40) if team(one, n) and record(one).get("breaches"))
        assert breached
        translated = [
            team(one, 80 + epoch, guard=GuardOrders(GuardMode.OFF, epoch=epoch)).receipt.translated for epoch in (0, 1)
        ]
        assert translated[0] > 0 and translated[1] == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"reuse": ReuseMode.EXACT},
        {"prompt_logprobs": 1},
        {"sampling": replace(request(tokens(1, 9)).sampling, max_tokens=0)},
        {"sampling": replace(request(tokens(1, 9)).sampling, temperature=0.8, seed=1)},
        {"sampling": replace(request(tokens(1, 9)).sampling, ignore_eos=False, grammar="start: /[a-z]{6}/")},
    ],
)
def test_all_kinds_of_requests_are_served_under_the_guard(changes: dict[str, Any]) -> None:
    with engine() as one:
        for number in range(4):
            done = team(one, number, **changes)
            assert done.receipt.prompt_tokens == 61
            assert record(one).get("checks", 0) == 0 or "sampling" in changes


def test_answers_under_the_guard_are_those_without_it() -> None:
    """Until something is withheld: checks change no other request."""
    answers = []
    for mode in ("off", "on"):
        with engine(mode=mode, max_changed=1) as one:
            answers.append([team(one, number).tokens for number in range(6)])
    assert answers[0] == answers[1]


def test_an_aborted_run_and_a_closed_engine_leave_nothing_waiting() -> None:
    one = engine(budget=0.0)
    with one:
        for number in range(3):
            team(one, number)
        streams = [one.submit(request(tokens(n, 27), agent="solver", run="aborted", max_tokens=400)) for n in range(6)]
        for stream in streams:
            assert one.cancel(stream.request_id) or stream.result(60)
        one.end_run(request(tokens(0, 27), run="aborted").run_key)
        assert all(stream.result(60) for stream in streams)
        one.wait_idle(60)
        last = one.submit(request(tokens(9, 27), agent="solver", run="last"))
    assert last.result(10)


def test_a_guard_that_fails_fails_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a bug")

    with engine() as one:
        team(one, 0)
        for method in ("verdict", "notes", "translated"):
            monkeypatch.setattr(QualityGuard, method, fail)
        done = team(one, 1)
        assert done.tokens and done.receipt.translated == 0
        monkeypatch.setattr(GuardedCalls, "begin", fail)
        with pytest.raises(Exception, match="queued"):
            one.submit(request(tokens(1, 9))).result(10)
        monkeypatch.undo()
        assert team(one, 2).tokens
