"""The guard in the engine: a model whose anchors predict nothing is caught, and what is proved is translated."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kedge.engine.common.guarding import check
from kedge.engine.common.guarding.guarded_calls import GuardedCalls
from kedge.engine.common.stream import TokenStream
from kedge.engine.local.engine import LocalEngine
from kedge.guard import EVERYTHING, FidelityNote, GuardMode, GuardOrders
from kedge.reuse.guard import guard as guard_module
from kedge.reuse.guard.comparison import TOP, mean_divergence
from kedge.reuse.guard.fidelity import LEAST, RUNGS
from kedge.reuse.guard.guard import QualityGuard
from kedge.reuse.planner import UNPROVED, WITHHELD
from kedge.settings import AnchorSettings, GuardSettings
from kedge.types import Completion, GenerateRequest, ReuseMode
from tests.engine.local.conftest import SHAPE, engine_of, tiny_model
from tests.engine.local.test_translation import OPEN, request, tokens

EAGER = GuardSettings(share=1.0)


@contextmanager
def engine(**guard: object) -> Iterator[LocalEngine]:
    """An engine that translates whatever it has seen once: on a random model that changes most answers. Of the flat
    distributions of such a model, the likeliest tokens show little.
    """
    settings = GuardSettings(**{**EAGER.model_dump(), **guard})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "FAR", 0.02)
        with engine_of(tiny_model("llama"), anchors=AnchorSettings(**OPEN), guard=settings) as one:
            yield one


@pytest.fixture(scope="module", autouse=True)
def without_sentinels() -> Iterator[None]:
    """Of the flat distributions of a random model, sentinel tokens show little."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard_module, "SENTINELS", 0)
        yield


def asked(number: int, agent: str = "solver", tenant: str = "default", **changes: Any) -> GenerateRequest:
    one = request(tokens(100 + number, 27), agent=agent, run=f"run-{number}")
    return replace(one, tenant=tenant, **changes)


def team(engine: LocalEngine, number: int, tenant: str = "default", **changes: Any) -> Completion:
    """A run of two agents that read a question of their own; the second one's answer."""
    for agent in ("critic", "solver"):
        mine = asked(number, agent, tenant, **changes)
        done = engine.submit(mine).result(60)
        engine.wait_idle(60)
    engine.end_run(mine.run_key)
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
    with engine(budget=0.0) as one:
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


def test_a_guard_that_fails_before_a_request_is_queued_ends_that_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a bug")

    with engine() as one:
        monkeypatch.setattr(GuardedCalls, "begin", fail)
        with pytest.raises(Exception, match="queued"):
            one.submit(request(tokens(1, 9))).result(10)
        monkeypatch.undo()
        assert team(one, 2).tokens


BUDGET = 0.002
MOVED = next(number for number, rung in enumerate(RUNGS) if not rung.by_anchors)
"""Inputs are translated by anchors on any rung; on this one no token is too weak"""


def even_model() -> PreTrainedModel:
    """A model that says nearly the same whatever it has read: translation changes next to nothing."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, "initializer_range": 0.01})).eval()


def proving(model: PreTrainedModel, **guard: object) -> LocalEngine:
    settings = GuardSettings(**{"fidelity": "fp8", **guard})
    return engine_of(model, anchors=AnchorSettings(**OPEN), guard=settings)


def note(done: Completion) -> FidelityNote:
    assert done.receipt.fidelity is not None
    return done.receipt.fidelity


@pytest.fixture(scope="module")
def story() -> Iterator[tuple[LocalEngine, list[Completion]]]:
    """An engine that answers nearly the same however it is translated, with the answers of its first calls."""
    with proving(even_model()) as one:
        yield one, [team(one, number) for number in range(LEAST + 6)]


def test_the_first_calls_are_computed_and_then_a_proved_rung_serves(
    story: tuple[LocalEngine, list[Completion]],
) -> None:
    served = [done.receipt.translated > 0 for done in story[1]]
    first = served.index(True)
    assert first >= LEAST and all(served[first:])
    for done in story[1][:first]:
        assert ("user_question", UNPROVED) in {(miss.segment, miss.reason) for miss in done.receipt.misses}
        assert (note(done).rung, note(done).mean, note(done).bound) == ("", None, None)
    for done in story[1][first:]:
        found = note(done)
        assert found.rung in {rung.name for rung in RUNGS} and found.budget == BUDGET and found.checks >= LEAST
        assert found.mean is not None and found.bound is not None and found.mean <= found.bound <= BUDGET
        assert found.rung in {name for name, _, _ in found.curve}


def test_what_serves_goes_on_being_compared(story: tuple[LocalEngine, list[Completion]]) -> None:
    before, last = note(story[1][-2]), note(story[1][-1])
    assert last.checks > before.checks or last.rung != before.rung
    figures: Any = story[0].inspect()["guard"]
    assert figures["fidelity"] == BUDGET
    (mine,) = [one for one in figures["agents"] if one["agent"] == "solver"]
    assert mine["checks"] > 0 and mine["changed"] == 0 and mine["fidelity"]["rung"] == last.rung


def test_a_control_over_the_same_kv_measures_the_noise_of_rounding() -> None:
    with proving(even_model()) as one, patch.object(QualityGuard, "found", autospec=True) as found:
        controls = list[Completion]()

        def submit(again: GenerateRequest) -> TokenStream:
            stream = one.submit(again)
            if again.reuse is ReuseMode.EXACT:
                controls.append(stream.result(60))
            return stream

        with patch.object(one._guard.checks, "_submit", submit):
            team(one, 1)
        noises = [call.args[5] for call in found.call_args_list]
        assert len(controls) == len(noises) == 2 and all(0 <= noise < 1e-6 for noise in noises)
        assert all(control.receipt.computed <= 16 for control in controls), "the cache has the rest of the prompt"


def test_a_call_may_have_a_budget_of_its_own(story: tuple[LocalEngine, list[Completion]]) -> None:
    strict = team(story[0], 50, guard=GuardOrders(fidelity=1e-12))
    assert strict.receipt.translated == 0 and (note(strict).budget, note(strict).rung) == (1e-12, "")
    free = team(story[0], 51, guard=GuardOrders(fidelity=inf))
    assert free.receipt.translated > 0 and free.receipt.fidelity is None
    assert team(story[0], 52).receipt.translated > 0, "which changes nothing of others"
    shadow = team(story[0], 53, guard=GuardOrders(GuardMode.SHADOW))
    assert shadow.receipt.translated == 0


def test_clients_see_nothing_of_how_it_is_proved(story: tuple[LocalEngine, list[Completion]]) -> None:
    for done in story[1]:
        assert len(done.tokens) == 6 and done.logprobs == ()
    dense = [story[0].submit(asked(number, reuse=ReuseMode.OFF)).result(60).tokens for number in range(3)]
    assert [done.tokens for done in story[1][:3]] == dense, "while nothing is proved, answers are dense prefill's"


def test_a_proof_outlives_the_engine(story: tuple[LocalEngine, list[Completion]], tmp_path: Path) -> None:
    story[0].save(tmp_path / "saved")
    shutil.copytree(tmp_path / "saved", tmp_path / "copied")
    with proving(even_model()) as other:
        assert not other.load(tmp_path / "copied").damaged
        assert team(other, 70).receipt.translated > 0
        assert team(other, 71, "other").receipt.translated == 0


def test_an_agent_that_every_translation_changes_is_never_translated() -> None:
    with proving(tiny_model("llama")) as one:
        answers = [team(one, number) for number in range(LEAST + 6)]
        assert not any(done.receipt.translated for done in answers)
        last = note(answers[-1])
        assert last.rung == "" and last.curve and all(mean > BUDGET for _, mean, _ in last.curve)
        figures: Any = one.inspect()["guard"]
        assert {entry["agent"] for entry in figures["agents"]} >= {"solver"}, "which is told"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_check_leaves_out_what_was_learned_from_its_own_call(temperature: float) -> None:
    """With the anchor of the call that it checks, every check would be clean."""
    with proving(tiny_model("llama"), mode="off") as one:
        for number in range(4):
            team(one, number)
        critic, mine = (asked(9, agent, logprobs=TOP) for agent in ("critic", "solver"))
        one.submit(critic).result(60)
        one.wait_idle(60)
        sampling = replace(mine.sampling, temperature=temperature, seed=1 if temperature else None)
        dense = one.submit(replace(mine, sampling=sampling, reuse=ReuseMode.OFF, request_id="dense")).result(60)
        withheld = GuardOrders(withheld=frozenset((EVERYTHING,)))
        one.submit(replace(mine, guard=withheld, request_id="learned")).result(60)
        one.wait_idle(60)
        found = []
        for held_out in (False, True):
            orders = GuardOrders(GuardMode.OFF, rung=MOVED, afresh=EVERYTHING, held_out=held_out)
            again = replace(mine, guard=orders, forced=dense.tokens, request_id=f"again-{held_out}")
            done = one.submit(again).result(60)
            found.append((done.receipt.translated, mean_divergence(dense, done)))
    (own, near), (others, far) = found
    assert own and near is not None and near < 1e-4
    assert others and far is not None and far > BUDGET
