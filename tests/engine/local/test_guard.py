"""The guard in the engine: a model whose anchors predict nothing is caught, and what is proved is translated."""

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
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
from kedge.engine.local.sentinels import Sentinels
from kedge.guard import EVERYTHING, FidelityNote, GuardMode, GuardOrders
from kedge.kv.storage import SlotTable
from kedge.reuse.guard import guard as guard_module
from kedge.reuse.guard.comparison import TOP, mean_divergence
from kedge.reuse.guard.fidelity import LEAST, RUNGS
from kedge.reuse.guard.guard import QualityGuard
from kedge.reuse.plan import Sentinel
from kedge.reuse.planner import UNPROVED, WITHHELD
from kedge.settings import AnchorSettings, GuardSettings
from kedge.types import Completion, GenerateRequest, ReuseMode, Source
from tests.engine.local.conftest import SHAPE, engine_of, served, tiny_model
from tests.engine.local.stepping import Stepped
from tests.engine.local.test_translation import OPEN, Driver, relative, request, tokens

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
        done = served(engine, mine)
    engine.end_run(mine.run_key)
    return done


def record(engine: LocalEngine, agent: str = "solver") -> dict[str, Any]:
    return next((one for one in engine.inspect()["guard"]["agents"] if one["agent"] == agent), {})


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


def test_a_check_goes_before_the_requests_that_wait() -> None:
    """Its tokens are within a budget, and calls are served densely until it has been judged."""
    stepped, guard = Stepped(max_running=1), GuardedCalls(lambda _: pytest.fail("none of its own"), GuardSettings())
    for number in range(3):
        stepped.core.requests.submit(stepped.sequence(request(tokens(number, 27), agent="solver")), guard)
    checks = [stepped.sequence(request(tokens(9, 27), agent="solver")) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard.checks, "is_under_way", lambda _: True)
        for one in checks:
            stepped.core.requests.submit(one, guard)
    assert [*stepped.core.scheduler.waiting][:2] == checks


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
        assert "solver" in {entry["agent"] for entry in one.inspect()["guard"]["agents"]}, "which is told"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_check_leaves_out_what_was_learned_from_its_own_call(temperature: float) -> None:
    """With the anchor of the call that it checks, every check would be clean."""
    with proving(tiny_model("llama"), mode="off") as one:
        for number in range(4):
            team(one, number)
        critic, mine = (asked(9, agent, logprobs=TOP) for agent in ("critic", "solver"))
        served(one, critic)
        sampling = replace(mine.sampling, temperature=temperature, seed=1 if temperature else None)
        dense = one.submit(replace(mine, sampling=sampling, reuse=ReuseMode.OFF, request_id="dense")).result(60)
        withheld = GuardOrders(withheld=frozenset((EVERYTHING,)))
        served(one, replace(mine, guard=withheld, request_id="learned"))
        found = []
        for held_out in (False, True):
            orders = GuardOrders(GuardMode.OFF, rung=MOVED, recheck=EVERYTHING, held_out=held_out)
            again = replace(mine, guard=orders, forced=dense.tokens, request_id=f"again-{held_out}")
            done = one.submit(again).result(60)
            found.append((done.receipt.translated, mean_divergence(dense, done)))
    (own, near), (others, far) = found
    assert own and near is not None and near < 1e-4
    assert others and far is not None and far > BUDGET


# sentinel tokens: translated KV is compared with computed KV, and a refuted translation is computed -------------------

NAMES = frozenset(("user_question", "condition_solver_current"))
WATCHED = GuardOrders(sentinels=2, watched=NAMES)


def watched(seed: int, reuse: ReuseMode = ReuseMode.TRANSLATE, agent: str = "critic") -> GenerateRequest:
    made = request(tokens(seed, 30), tokens(seed + 1, 24), reuse, agent)
    return replace(made, guard=WATCHED if agent == "critic" else GuardOrders())


def driver(*seeds: int, refutes: bool = False) -> tuple[Driver, list[dict[Sentinel, float]]]:
    """An engine that has base KV of these values and offsets of others, and the errors of its later prompts."""
    made, seen = Driver(), []
    for taught in (50, 60):
        made.serve(watched(taught, agent="solver"))
        made.serve(watched(taught))
    for seed in seeds:
        made.serve(watched(seed, agent="solver"))
    made.core.judge = lambda _, errors: (seen.append(dict(errors)), refutes)[1]
    return made, seen


def test_sentinels_are_computed_and_lie_in_translated_values() -> None:
    made, seen = driver(70)
    served, _ = made.serve(watched(70))
    assert served.plan is not None and served.plan.translates
    assert len(seen) == 1 and len(seen[0]) == 4  # two in each of two values
    assert {one.position for one in seen[0]} <= set(served.plan.computed)
    assert all(33 <= one.position < 63 or 72 <= one.position < 96 for one in seen[0])
    assert all(error > 0 for error in seen[0].values())


def test_every_request_has_sentinels_of_its_own() -> None:
    made, seen = driver(70)
    for _ in range(6):
        made.serve(watched(70))
    assert len({frozenset(one) for one in seen}) > 1
    made.serve(replace(watched(70), guard=GuardOrders()))
    assert len(seen) == 6, "and without a guard none"


@pytest.mark.parametrize("is_finite", [True, False])
def test_a_refuted_translation_is_computed_before_the_first_token_and_learned_from(is_finite: bool) -> None:
    """What is not a number also reaches tokens before it that are computed in the same pass, under the mask."""
    made, seen = driver(70, refutes=True)
    before = made.core.parts.stats()["learning"]["observed"]
    for pool in () if is_finite else made.core.parts.anchors.pools.values():
        for table in pool.tables:
            table.arena.fill_(math.nan)
    served, kv = made.serve(watched(70))
    assert made.core.parts.stats()["learning"]["observed"] == before + 1
    dense, expected = made.serve(watched(70, ReuseMode.OFF))
    assert len(seen) == 1 and all(map(math.isfinite, seen[0].values())) == is_finite
    assert relative(kv.values, expected.values) < 1e-5 and relative(kv.keys, expected.keys) < 1e-5
    assert served.response == dense.response
    receipt = served.receipt()
    assert receipt.tokens(Source.TRANSLATED) == 0 and receipt.prompt_tokens == 101
    assert any("the guard computed it" in miss.reason for miss in receipt.misses)


@pytest.mark.parametrize("part", ["keys", "values"])
def test_an_error_is_relative_to_what_is_computed_and_the_first_layer_does_not_count(part: str) -> None:
    storage = Driver().core.parts.storage
    table, sentinels = SlotTable.of([3, 1], storage.block_size), Sentinels(storage)
    torch.nn.init.normal_(storage.keys), torch.nn.init.normal_(storage.values)
    before = [sentinels.read(table, [Sentinel(at, False)]) for at in (2, 17)]
    getattr(storage, part)[0] += 1
    assert sentinels.errors(before) == [0.0, 0.0]
    getattr(storage, part)[:, table.slots[17]] *= 2  # half of what is there now is missing
    assert sentinels.errors(before) == pytest.approx([0.0, 0.5])
