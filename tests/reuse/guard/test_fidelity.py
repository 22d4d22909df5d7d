"""How an agent's translation is proved: bounds of a mean, the rung that serves, and proofs as data."""

import itertools
import json
from collections.abc import Callable, Sequence
from math import inf, log, sqrt
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.reuse.guard.fidelity import (
    FORGET,
    LEAST,
    RETRIED,
    RUNGS,
    SETTLED,
    MeanEvidence,
    Proof,
    RungFinding,
    SavedProof,
    Serving,
)

ALPHA, BUDGET = 0.05, 0.002
VALUES = st.lists(st.floats(0, 20), max_size=60)


def evidence(values: Sequence[float]) -> MeanEvidence:
    seen = MeanEvidence()
    for value in values:
        seen.observe(value)
    return seen


# the mean --------------------------------------------------------------------------------------------------------


@given(VALUES, st.floats(1e-6, 0.4))
def test_the_bounds_are_those_of_the_confidence_sequence(values: list[float], alpha: float) -> None:
    """Written as in the paper: t values of deviation s, with rho squared 0.35."""
    seen = evidence(values)
    if len(values) < LEAST:
        assert seen.upper(alpha) == inf and seen.lower(alpha) == 0
        return
    weights = FORGET ** numpy.arange(len(values))[::-1]
    mean = float(numpy.average(values, weights=weights))
    s = float(numpy.average((numpy.array(values) - mean) ** 2, weights=weights)) ** 0.5
    t = float(weights.sum() ** 2 / (weights**2).sum())
    radius = sqrt(2 * (t * 0.35 + 1) / (t**2 * 0.35) * log(sqrt(t * 0.35 + 1) / (2 * alpha)))
    assert seen.upper(alpha) == pytest.approx(mean + max(s, 1.5 * mean) * radius, rel=1e-6, abs=1e-6)
    assert seen.lower(alpha) == pytest.approx(max(0.0, mean - s * radius), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("draw, mean", [
    (lambda rng: rng.exponential(1.0, 60), 1.0), (lambda rng: rng.lognormal(0.0, 1.0, 60), numpy.exp(0.5)),
])  # fmt: skip
def test_the_upper_bound_holds_at_all_times_at_once(
    draw: Callable[[numpy.random.Generator], numpy.ndarray[Any, Any]], mean: float
) -> None:
    """Divergences are skewed: few of them are far above the mean, and the bound is asymptotic."""
    rng, runs, missed = numpy.random.default_rng(0), 300, 0
    for _ in range(runs):
        seen, bounds = MeanEvidence(), []
        for value in draw(rng):
            seen.observe(float(value))
            bounds.append(seen.upper(ALPHA))
        missed += min(bounds) < mean
    assert missed <= 0.1 * runs


# the rung that serves -----------------------------------------------------------------------------------------------


NUMBERS = itertools.count()


def observe(proof: Proof, finding: RungFinding, noise: float | None = None) -> None:
    """Take a comparison of another prompt."""
    proof.observe(finding, next(NUMBERS), noise)


def found(proof: Proof, rung: int, divergence: float, computed: float = 0.1, times: int = 40) -> Proof:
    """Take so many comparisons about this far off, and choose after each of them."""
    for number in range(times):
        observe(proof, RungFinding(rung, divergence * (1.2 if number % 2 else 0.8), computed))
        proof.choose(BUDGET, ALPHA)
    return proof


def serving(proof: Proof) -> int | None:
    return proof.choose(BUDGET, ALPHA)


def test_nothing_serves_before_it_is_proved() -> None:
    proof = Proof()
    assert serving(proof) is None and sorted(proof.to_try(BUDGET, ALPHA)) == [*range(len(RUNGS))]
    found(proof, 2, 0.0, times=LEAST - 1)
    assert serving(proof) is None
    found(proof, 2, 0.0, times=1)
    assert serving(proof) == 2


def test_the_cheapest_rung_that_is_proved_serves() -> None:
    proof = found(Proof(), 4, BUDGET / 5, computed=0.4)
    assert serving(proof) == 4 and 0 in proof.to_try(BUDGET, ALPHA)
    found(proof, 3, BUDGET / 5, computed=0.2)
    assert serving(proof) == 3
    found(proof, 0, 5 * BUDGET, computed=0.0)
    found(proof, 2, 0.9 * BUDGET, computed=0.1, times=LEAST)
    assert serving(proof) == 3, "one is too far off, the other may be"
    assert sorted(proof.to_try(BUDGET, ALPHA)) == [1, 2], "what is dearer, or known to be too far off, is not tried"


def test_each_rung_has_its_part_of_alpha() -> None:
    proof = found(Proof(), 2, BUDGET, times=12)
    alone, among = (proof.rungs[2].divergence.upper(alpha) for alpha in (ALPHA, ALPHA / len(RUNGS)))
    assert (proof.choose((alone + among) / 2, ALPHA), proof.choose(among, ALPHA)) == (None, 2)


def test_anchors_that_were_too_far_off_are_tried_again_now_and_then() -> None:
    """They get better with samples; what is moved does not."""
    proof = found(found(Proof(), 0, 5 * BUDGET, computed=0.0), 1, 5 * BUDGET)
    tried = [proof.to_try(BUDGET, ALPHA) for _ in range(8 * RETRIED)]
    assert sum(1 in one for one in tried) == 8 and not any(0 in one for one in tried)
    found(proof, 1, BUDGET / 5, times=80)
    assert serving(proof) == 1


def test_what_is_hopeless_after_two_comparisons_is_put_off() -> None:
    proof = found(Proof(), 0, 5 * BUDGET, times=2)
    found(proof, 2, 3 * BUDGET, times=2)
    tried = [proof.to_try(BUDGET, ALPHA) for _ in range(RETRIED)]
    assert sum(0 in one for one in tried) == 1 and all(2 in one for one in tried)


def test_the_rung_that_serves_is_left_for_one_that_computes_a_tenth_less() -> None:
    """Shares that are nearly equal would else change places at every few comparisons."""
    proof = Proof()
    for rung in (2, 1):
        found(proof, rung, BUDGET / 5)
    assert serving(proof) == 2
    for computed in [0.01] * 60:
        observe(proof, RungFinding(1, BUDGET / 5, computed))
    assert serving(proof) == 1


def test_what_serves_goes_on_until_its_mean_is_above_the_budget() -> None:
    """Else it would be left and taken up again at every few comparisons."""
    proof = found(Proof(), 2, BUDGET / 5)
    found(proof, 2, 0.9 * BUDGET, times=60)
    assert proof.rungs[2].divergence.upper(ALPHA) > BUDGET and serving(proof) == 2
    found(proof, 2, 1.5 * BUDGET, times=60)
    assert serving(proof) is None
    found(proof, 2, 0.9 * BUDGET, times=60)
    assert serving(proof) is None, "it has to be proved anew"
    found(proof, 2, BUDGET / 5, times=60)
    assert serving(proof) == 2


def test_a_rung_that_gets_worse_is_left_for_another_that_is_proved() -> None:
    proof = found(found(found(Proof(), 0, BUDGET / 5, 0.5), 5, BUDGET / 5, 0.3), 1, BUDGET / 5, 0.1)
    assert serving(proof) == 1
    proof.serving[BUDGET].calls = 30
    found(proof, 1, 4 * BUDGET, times=10)
    assert proof.serving[BUDGET] == Serving(0, 0), "its first calls are all compared"
    assert 5 not in proof.rungs, "by the same anchors"


def test_calls_after_a_move_to_a_cheaper_rung_are_no_first_calls() -> None:
    proof = found(Proof(), 3, BUDGET / 5, 0.3)
    assert serving(proof) == 3
    proof.serving[BUDGET].calls = 30
    assert serving(found(proof, 2, BUDGET / 5, 0.1)) == 2
    assert proof.serving[BUDGET].calls == 30


MEASURED = numpy.array([4.8, 7.9, 10.7, 9.8, 2.8, 3.4, 7.8, 2.3, 30.7, 7.8, 7.7, 7.0, 2.5, 18.0, 5.7, 10.7]) * 1e-4
"""What anchors have with SmolLM2 in bfloat16, less the noise: 0.0009 in the mean"""


def watched(proof: Proof, divergences: Sequence[float], share: float = 0.2) -> int | None:
    """Serve such calls, of which this share is compared, and all while one is suspicious. Returns when it was over."""
    rng = numpy.random.default_rng(len(divergences))
    for call, divergence in enumerate(divergences):
        if proof.serving[BUDGET].suspicion or rng.random() < share:
            observe(proof, RungFinding(3, float(divergence), 0.1))
        if serving(proof) is None:
            return call
    return None


def anchored(rng: numpy.random.Generator, scale: float) -> Proof:
    while True:
        proof = Proof()
        for divergence in scale * rng.choice(MEASURED, 16):
            observe(proof, RungFinding(3, float(divergence), 0.1))
        if serving(proof) is not None:
            return proof


def test_a_rise_above_the_budget_is_seen_within_some_calls() -> None:
    """By half of the budget, after long traffic at a third of it: the mean of all needs a hundred calls for that."""
    rng, found = numpy.random.default_rng(5), []
    for _ in range(60):
        proof = anchored(rng, 0.75)
        watched(proof, 0.75 * rng.choice(MEASURED, 60))
        found.append(watched(proof, 3.4 * rng.choice(MEASURED, 100)) if serving(proof) is not None else 0)
    late = [one for one in found if one is None or one > 20]
    assert len(late) < 15, found


@pytest.mark.parametrize("scale", [0.5, 0.75, 1.0])
def test_what_stays_within_the_budget_is_not_switched_off(scale: float) -> None:
    """In 2,000 calls each, as far off as measured and nearer."""
    rng = numpy.random.default_rng(6)
    over = [watched(anchored(rng, scale), scale * rng.choice(MEASURED, 2000)) for _ in range(20)]
    assert sum(one is not None for one in over) <= (scale == 1.0), over


def test_a_rise_within_the_budget_only_begins_the_evidence_anew() -> None:
    proof = found(Proof(), 3, BUDGET / 20, times=100)
    found(proof, 3, 0.6 * BUDGET, times=12)
    assert serving(proof) == 3 and proof.rungs[3].divergence.mean == pytest.approx(0.6 * BUDGET, rel=0.1)
    once = found(found(Proof(), 3, BUDGET / 20, times=100), 3, 50 * BUDGET, times=1)
    assert once.rungs[3].divergence.count == 101, "a single answer is not one"


def test_the_noise_of_rounding_is_no_divergence() -> None:
    """That of the same prompt, or the usual one where that is not known."""
    proof = Proof()
    for noise in (0.0012, 0.0008) * LEAST:
        proof.noise.observe(noise)
        observe(proof, RungFinding(0, BUDGET / 10 + noise, 0.1), noise)
    assert proof.rungs[0].divergence.mean == pytest.approx(BUDGET / 10) and serving(proof) == 0
    observe(proof, RungFinding(1, BUDGET / 10 + 0.001, 0.1))
    assert proof.rungs[1].divergence.mean == pytest.approx(BUDGET / 10, abs=1e-4)
    proof.rungs[0].divergence.mean = -1e-5
    note = proof.note(BUDGET, ALPHA)
    assert note.mean == 0.0 and note.curve[0][1] == 0.0, "less than nothing is nothing"


def test_a_repeated_prompt_proves_nothing_more_but_shows_what_got_worse() -> None:
    proof = Proof()
    for _ in range(4 * LEAST):
        proof.observe(RungFinding(1, BUDGET / 10, 0.1), 7)
    assert proof.rungs[1].divergence.count == 1 and serving(proof) is None
    proof.observe(RungFinding(1, BUDGET, 0.1), 7)
    assert proof.rungs[1].divergence.count == 2
    observe(proof, RungFinding(2, BUDGET / 10, 0.1))
    proof.observe(RungFinding(2, BUDGET / 10, 0.1), 7)
    assert proof.rungs[2].divergence.count == 2, "it was not compared on this rung"
    assert not proof.is_settled and found(proof, 1, BUDGET / 5, times=SETTLED).is_settled


def test_what_translates_nothing_is_tried_less_and_less_until_it_does() -> None:
    proof, tries = Proof(), 0
    for _ in range(400):
        rungs = proof.to_try(BUDGET, ALPHA)
        proof.untranslated.update(rungs)
        tries += bool(rungs)
    assert LEAST < tries < 6 * LEAST and any(proof.to_try(BUDGET, ALPHA) for _ in range(64))
    observe(proof, RungFinding(1, BUDGET / 10, 0.1))
    assert 1 in proof.to_try(BUDGET, ALPHA)


def test_every_budget_has_a_rung_of_its_own() -> None:
    """Calls of one agent with different budgets change nothing of each other's."""
    proof = found(found(Proof(), 1, BUDGET / 5), 5, BUDGET / 100, computed=0.5)
    proof.serving[BUDGET].calls = 30
    assert proof.choose(BUDGET / 10, ALPHA) == 5 and proof.choose(BUDGET / 1000, ALPHA) is None
    assert serving(proof) == 1 and proof.serving[BUDGET].calls == 30
    for number in range(1, 100):
        proof.choose(BUDGET + number, ALPHA)
    assert len(proof.serving) < 10, "a client could else fill the memory"


def test_discarded_anchors_prove_nothing() -> None:
    proof = found(found(Proof(), 0, BUDGET / 5, computed=0.5), 1, BUDGET / 5)
    assert serving(proof) == 1
    proof.forget_anchors()
    assert list(proof.rungs) == [0] and not RUNGS[0].by_anchors
    assert serving(proof) == 0, "moving needs none"
    proof.forget_anchors()
    assert serving(proof) == 0


def test_how_near_the_budget_it_is() -> None:
    proof = found(Proof(), 1, BUDGET / 10)
    seen = proof.rungs[1].divergence
    assert proof.nearness(BUDGET, ALPHA) == pytest.approx(seen.upper(ALPHA / len(RUNGS)) / BUDGET)
    assert proof.nearness(BUDGET / 100, ALPHA) == 1.0 and Proof().nearness(BUDGET, ALPHA) == 1.0


def test_a_note_has_the_rung_that_serves_with_its_bound_and_all_that_was_tried() -> None:
    empty = Proof().note(BUDGET, ALPHA)
    assert (empty.rung, empty.mean, empty.bound, empty.checks, empty.curve) == ("", None, None, 0, ())
    proof = found(found(Proof(), 0, 5 * BUDGET, computed=0.0, times=12), 1, BUDGET / 5, computed=0.3)
    note, seen = proof.note(BUDGET, ALPHA), proof.rungs[1].divergence
    assert (note.budget, note.rung, note.checks) == (BUDGET, RUNGS[1].name, 40)
    assert (note.mean, note.bound) == (seen.mean, seen.upper(ALPHA / len(RUNGS))) and seen.mean < note.bound <= BUDGET
    assert [(name, computed) for name, _, computed in note.curve] == [(RUNGS[0].name, 0.0), (RUNGS[1].name, 0.3)]


# proofs as data -----------------------------------------------------------------------------------------------------

FINDINGS = st.lists(
    st.builds(RungFinding, st.integers(0, len(RUNGS) - 1), st.floats(0, 3 * BUDGET), st.floats(0, 1)), max_size=60
)


def go_on(proof: Proof, findings: list[RungFinding]) -> None:
    for one in findings:
        proof.noise.observe(one.divergence / 10)
        observe(proof, one)
        proof.choose(BUDGET, ALPHA)


def saved(proof: Proof) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(SavedProof.of("solver", "0a1b", proof).model_dump(mode="json")))
    return data


@given(FINDINGS, FINDINGS)
def test_a_restored_proof_goes_on_as_if_nothing_had_happened(
    before: list[RungFinding], after: list[RungFinding]
) -> None:
    proof = Proof()
    go_on(proof, before)
    read = SavedProof.model_validate(saved(proof))
    restored = read.proof()
    assert (read.agent, read.wording) == ("solver", "0a1b")
    go_on(proof, after)
    go_on(restored, after)
    assert restored.rungs == proof.rungs and restored.noise == proof.noise
    assert serving(restored) == serving(proof)


def test_rungs_of_another_version_are_left_out_and_the_one_that_serves_goes_on() -> None:
    proof = found(Proof(), 1, BUDGET / 5)
    assert serving(proof) == 1
    proof.serving[BUDGET].calls = 30
    data = saved(proof)
    data["rungs"]["moved by hand"] = data["rungs"][RUNGS[1].name]
    read = SavedProof.model_validate(data).proof()
    assert list(read.rungs) == [1] and read.serving == {BUDGET: Serving(1, 30)}
