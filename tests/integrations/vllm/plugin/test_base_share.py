"""How much of a step base prefills take beside requests."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kedge.engine.common.guarding.guarded_calls import GRACE
from kedge.integrations.vllm.plugin.learning_budget import PATIENCE, BaseShare
from kedge.policies.service import StepTimes


def times() -> StepTimes:
    """Decode steps take as long as ten tokens of a prompt."""
    found = StepTimes()
    found.step(1, 1, 0.02)
    found.step(100, 1, 0.2)
    return found


@pytest.mark.parametrize(("share", "tokens"), [(0.0, 0), (0.5, 10), (0.75, 30), (1.0, 64)])
def test_a_decode_step_gives_its_share_of_time(share: float, tokens: int) -> None:
    assert BaseShare(share, times()).beside(0, 64) == tokens


def test_before_times_are_known_it_is_a_share_of_the_tokens() -> None:
    assert BaseShare(0.5, StepTimes()).beside(0, 64) == 32


def test_steps_with_prefills_are_passed_over_a_few_times_in_a_row() -> None:
    share = BaseShare(0.5, times())
    found = [share.beside(40, 64) for _ in range(2 * (PATIENCE + 1))]
    assert found == 2 * ([0] * PATIENCE + [50])
    assert [share.beside(*step) for step in ((40, 64), (0, 64), (0, 64))] == [0, 0, 10], "its token is read in the next"
    assert [share.beside(40, 64) for _ in range(PATIENCE)] == [0] * PATIENCE
    assert share.beside(100, 64) == 64, "never more than is left"


def test_an_idle_engine_waits_a_moment_and_computes_a_piece_at_a_time() -> None:
    now = [0.0]
    share = BaseShare(0.5, times(), lambda: now[0])
    assert share.idle(1000) == 25, "of 2 ms each"
    share.computes()
    assert share.idle(1000) == 0
    now[0] = GRACE
    assert share.idle(1000) == 25 and share.idle(3) == 3
    assert BaseShare(0.5, StepTimes()).idle(1000) == 1000
