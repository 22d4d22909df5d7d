"""What work is expected to cost: recovered from what was observed, whatever else the machine did meanwhile."""

import random

import pytest

from kedge.reuse.costs import GRACE, OUTLIER, REFIT, EngineCosts, LinearCost

PRIOR = (1e-2, 1e-4, 1e-4)
TRUE = (2e-3, 1e-4, 3e-4)
"""Seconds of a pass, of each of its tokens, of each of its sequences"""


def cost(coefficients: tuple[float, ...], counts: tuple[float, ...]) -> float:
    return sum(each * count for each, count in zip(coefficients, counts, strict=True))


def passes(many: int, seed: int = 0) -> list[tuple[float, float, float]]:
    """Counts of passes of all sizes."""
    rng = random.Random(seed)
    return [(1.0, rng.randint(1, 500), rng.randint(1, 16)) for _ in range(many)]


def fitted(coefficients: tuple[float, ...], many: int = 64) -> LinearCost:
    linear = LinearCost(PRIOR)
    for counts in passes(many):
        linear.observe(counts, cost(coefficients, counts))
    return linear


# the regression -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("true", [TRUE, (0.0, 1e-4, 0.0), (5e-2, 1e-7, 1e-3)])
def test_known_coefficients_are_recovered(true: tuple[float, ...]) -> None:
    linear = fitted(true)
    assert linear.coefficients == pytest.approx(true, rel=1e-2, abs=1e-7)
    assert linear.of((1.0, 700, 20)) == pytest.approx(cost(true, (1.0, 700, 20)), rel=1e-3), "beyond what was seen"


@pytest.mark.parametrize("many", [1, 2, 3, 7])
def test_the_first_observations_count_at_once(many: int) -> None:
    linear, last = fitted(TRUE, many), passes(many)[-1]
    assert linear.of(last) == pytest.approx(cost(TRUE, last), rel=1e-2)


def test_what_was_never_counted_costs_what_was_assumed() -> None:
    linear = LinearCost(PRIOR)
    for tokens in range(1, 50):
        linear.observe((1.0, tokens, 0), cost(TRUE, (1.0, tokens, 0)))
    assert linear.coefficients == pytest.approx([TRUE[0], TRUE[1], PRIOR[2]], rel=1e-2)


@pytest.mark.parametrize("true", [(-1e-3, 1e-4, 3e-4), (3e-1, -1e-4, 3e-4), (2e-1, -1e-4, -1e-3)])
def test_no_coefficient_is_ever_negative(true: tuple[float, ...]) -> None:
    """Neither where more work seems to take less time, nor before there is enough to tell."""
    linear = LinearCost(PRIOR)
    for counts in passes(100):
        linear.observe(counts, max(0.0, cost(true, counts)))
        assert min(linear.coefficients) >= 0.0
    assert any(linear.coefficients)
    assert all(found == 0.0 for found, given in zip(linear.coefficients, true, strict=True) if given < 0)


@pytest.mark.parametrize(("factor", "many"), [(0.2, 1600), (3.0, 1600), (50.0, 6000)])
def test_a_change_is_followed_also_one_beyond_what_counts_as_an_outlier(factor: float, many: int) -> None:
    linear, changed = fitted(TRUE), tuple(factor * each for each in TRUE)
    for counts in passes(many, seed=3):
        linear.observe(counts, cost(changed, counts))
    assert linear.of((1.0, 250, 8)) == pytest.approx(cost(changed, (1.0, 250, 8)), rel=5e-2)


def test_an_outlier_counts_as_a_few_times_what_was_expected() -> None:
    counts = (1.0, 100, 2)
    wild, bounded = fitted(TRUE), fitted(TRUE)
    wild.observe(counts, 1000.0)
    bounded.observe(counts, OUTLIER * bounded.of(counts))
    for later in passes(REFIT):  # until the coefficients are computed anew
        wild.observe(later, cost(TRUE, later))
        bounded.observe(later, cost(TRUE, later))
    assert wild.coefficients == pytest.approx(bounded.coefficients)
    assert wild.of(counts) < 1.5 * cost(TRUE, counts)


# an engine's costs ----------------------------------------------------------------------------------------------------


def known_costs(*, by_cost: bool = True) -> EngineCosts:
    """0.1 ms a token to compute; 1 ms a segment and 0.01 ms a token to translate."""
    costs = EngineCosts(by_cost=by_cost)
    for _, tokens, sequences in passes(64):
        costs.observe_pass(int(tokens), int(sequences), cost(TRUE, (1.0, tokens, sequences)))
        costs.observe_translation(int(sequences), int(tokens), 1e-3 * sequences + 1e-5 * tokens)
    return costs


def test_what_a_pass_costs_and_what_more_work_adds_to_it() -> None:
    costs = known_costs()
    assert costs.pass_seconds(100, 2) == pytest.approx(2e-3 + 1e-2 + 6e-4, rel=1e-3)
    assert costs.added_seconds(100, 2) == pytest.approx(1e-2 + 6e-4, rel=1e-3)


def test_translation_pays_from_where_it_takes_half_the_time_of_computing_what_is_spared() -> None:
    """40 tokens take 1.4 ms to translate, half as long as 28 take to compute."""
    costs = known_costs()
    assert [tokens for tokens in range(1, 40) if costs.translation_pays(tokens, tokens)] == list(range(26, 40))
    assert [spared for spared in range(41) if costs.translation_pays(40, spared)] == list(range(29, 41))


def test_translation_is_tried_again_where_it_was_slow_for_once() -> None:
    """It is observed only where it seems to pay."""
    costs, tried = known_costs(), 0
    costs.settle()
    while costs.translation_pays(32, 32):
        costs.observe_translation(1, 32, 4e-3)
    for _ in range(2000):
        costs.observe_pass(100, 8, cost(TRUE, (1.0, 100, 8)))
        if costs.translation_pays(32, 32):
            costs.observe_translation(1, 32, 1e-3 + 32e-5)
            tried += 1
    assert tried > 1000


def test_what_a_device_is_spared_is_worth_less_while_it_waits_for_the_host() -> None:
    """28 tokens take 2.8 ms to compute, and translating them 1.28 ms of the host, which count twice."""
    costs = known_costs()
    costs.settle()
    for waited, pays in ((GRACE, True), (0.0, True), (0.9 * GRACE, False)):  # from GRACE on it waits for requests
        for _ in range(400):
            costs.observe_pass(100, 8, cost(TRUE, (1.0, 100, 8)), waited)
        assert costs.translation_pays(28, 28) is pays and costs.translation_pays(300, 300)


def test_base_kv_pays_with_as_many_readers_as_save_what_it_takes() -> None:
    """A base prefill of 54 tokens takes 5.7 ms, and each reader saves 5 - 2 * 1.5 ms by it."""
    costs = known_costs()
    assert [readers for readers in range(8) if costs.base_pays(54, 50, readers)] == list(range(3, 8))
    assert not costs.base_pays(14, 10, 1000), "translating itself does not pay"


def test_tokens_are_computed_ahead_beside_few_others_only() -> None:
    """32 tokens take 3.2 ms, and each that runs would wait 0.3 ms longer."""
    costs = known_costs()
    assert [running for running in range(20) if costs.ahead_pays(32, running)] == list(range(6))


def test_everything_pays_where_costs_are_not_to_be_asked() -> None:
    costs = known_costs(by_cost=False)
    assert all(costs.translation_pays(tokens, 0) for tokens in (1, 5, 100))
    assert costs.base_pays(100, 10, 1) and costs.ahead_pays(1, 100)
    assert costs.pass_seconds(100, 2) == pytest.approx(2e-3 + 1e-2 + 6e-4, rel=1e-3), "passes are shared all the same"


def test_a_steady_load_does_not_change_the_proportions_that_were_measured() -> None:
    """All of its passes are alike, so that nothing tells a sequence's cost from that of the pass itself."""
    linear = fitted(TRUE)
    linear.settle()
    for _ in range(500):
        linear.observe((1.0, 8, 8), 2 * cost(TRUE, (1.0, 8, 8)))
    assert linear.of((1.0, 8, 8)) == pytest.approx(2 * cost(TRUE, (1.0, 8, 8)), rel=0.02)
    once, _, sequence = linear.coefficients
    assert TRUE[0] < once < 3 * TRUE[0] and TRUE[2] < sequence < 3 * TRUE[2]


def test_what_was_measured_is_given_up_where_passes_tell_otherwise() -> None:
    """A measurement that was ten times off leaves a fifth of the truth."""
    linear = fitted((1e-2, 1e-3, 0.0))
    linear.settle()
    for counts in passes(2000):
        linear.observe(counts, cost(TRUE, counts))
    assert linear.of((1.0, 250, 8)) == pytest.approx(cost(TRUE, (1.0, 250, 8)), rel=0.25)


def test_as_many_tokens_as_fit_into_the_seconds() -> None:
    costs = known_costs()
    for seconds in (0.0, 5e-5, 1.5e-4, 1e-2, 0.033):
        count = costs.tokens_within(seconds, 300)
        assert costs.added_seconds(count, 0) <= seconds
        assert count == 300 or costs.added_seconds(count + 1, 0) > seconds
    assert costs.tokens_within(1.0, 300) == 300
    assert costs.tokens_within(1.0, 0) == 0
    assert costs.tokens_within(-1.0, 300) == 0
    costs = EngineCosts()  # of a machine on which a pass takes the same however long it is
    for _, tokens, sequences in passes(64):
        costs.observe_pass(int(tokens), int(sequences), 1e-2 - 1e-6 * tokens)
    assert costs.added_seconds(300, 0) == 0.0
    assert [costs.tokens_within(seconds, 300) for seconds in (-1e-3, 0.0, 1.0)] == [0, 300, 300]


def test_after_measuring_the_first_observation_is_bounded_too() -> None:
    """It may have built a kernel."""
    linear = LinearCost((1e-3, 1e-6))
    linear.observe((1, 1), 1e-3)
    linear.settle()
    before = linear.of((1, 1))
    linear.observe((1, 1), 3.0)
    assert linear.of((1, 1)) <= OUTLIER * before
