"""Proof in the engine: an agent's first calls are computed, then it is translated within its budget, or never."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kedge.engine.common.stream import TokenStream
from kedge.engine.local.engine import LocalEngine
from kedge.guard import EVERYTHING, FidelityNote, GuardMode, GuardOrders
from kedge.reuse.guard import guard as guard_module
from kedge.reuse.guard.comparison import TOP, mean_divergence
from kedge.reuse.guard.fidelity import LEAST, RUNGS
from kedge.reuse.guard.guard import QualityGuard
from kedge.reuse.planner import UNPROVED
from kedge.settings import AnchorSettings, GuardSettings
from kedge.types import Completion, GenerateRequest, ReuseMode, TenantId
from tests.engine.local.conftest import SHAPE, engine_of, tiny_model
from tests.engine.local.test_translation import OPEN, request, tokens

BUDGET = 0.002
MOVED = next(number for number, rung in enumerate(RUNGS) if not rung.by_anchors)
"""Inputs are translated by anchors on any rung; on this one no token is too weak"""


def even_model() -> PreTrainedModel:
    """A model that says nearly the same whatever it has read: translation changes next to nothing."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, "initializer_range": 0.01})).eval()


def engine(model: PreTrainedModel, **guard: object) -> LocalEngine:
    settings = GuardSettings(**{"fidelity": "fp8", **guard})
    return engine_of(model, anchors=AnchorSettings(**OPEN), guard=settings)


def asked(number: int, agent: str = "solver", tenant: str = "default", **changes: Any) -> GenerateRequest:
    one = request(tokens(300 + number, 27), agent=agent, run=f"run-{number}")
    return replace(one, tenant=TenantId(tenant), **changes)


def team(engine: LocalEngine, number: int, tenant: str = "default", **changes: Any) -> Completion:
    """A run of two agents that read a question of their own; the second one's answer."""
    for agent in ("critic", "solver"):
        mine = asked(number, agent, tenant, **changes)
        done = engine.submit(mine).result(60)
        engine.wait_idle(60)
    engine.end_run(mine.run_key)
    return done


def note(done: Completion) -> FidelityNote:
    assert done.receipt.fidelity is not None
    return done.receipt.fidelity


@pytest.fixture(scope="module", autouse=True)
def without_sentinels() -> Iterator[None]:
    """Of the flat distributions of a random model, sentinel tokens show little."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard_module, "SENTINELS", 0)
        yield


@pytest.fixture(scope="module")
def story() -> Iterator[tuple[LocalEngine, list[Completion]]]:
    """An engine that answers nearly the same however it is translated, with the answers of its first calls."""
    with engine(even_model()) as one:
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
    with engine(even_model()) as one, patch.object(QualityGuard, "found", autospec=True) as found:
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
    with engine(even_model()) as other:
        assert not other.load(tmp_path / "copied").damaged
        assert team(other, 70).receipt.translated > 0
        assert team(other, 71, "other").receipt.translated == 0


def test_an_agent_that_every_translation_changes_is_never_translated() -> None:
    with engine(tiny_model("llama")) as one:
        answers = [team(one, number) for number in range(LEAST + 6)]
        assert not any(done.receipt.translated for done in answers)
        last = note(answers[-1])
        assert last.rung == "" and last.curve and all(mean > BUDGET for _, mean, _ in last.curve)
        figures: Any = one.inspect()["guard"]
        assert {entry["agent"] for entry in figures["agents"]} >= {"solver"}, "which is told"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_check_leaves_out_what_was_learned_from_its_own_call(temperature: float) -> None:
    """With the anchor of the call that it checks, every check would be clean."""
    with engine(tiny_model("llama"), mode="off") as one:
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
