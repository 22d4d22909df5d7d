"""What is left alone since translating it does not pay, for how long, and what is tried meanwhile."""

from __future__ import annotations

from itertools import pairwise

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kedge.integrations.vllm.plugin.messages import TranslationVerdict
from kedge.integrations.vllm.plugin.translations import MAX_TRIED, TRIED, StandAside
from kedge.types import AgentId, GenerateRequest, RunId, Segment, WorkflowId

PAYS, LOSES = TranslationVerdict((range(100),)), TranslationVerdict((range(100),), is_losing=True)
DECLINED = TranslationVerdict((range(100),), is_declined=True)


def request(run: str = "", workflow: str = "w", agent: str = "a") -> GenerateRequest:
    segments = (Segment((5,), "q"),)
    return GenerateRequest(segments, run=RunId(run), workflow=WorkflowId(workflow), agent=AgentId(agent))


@pytest.fixture
def aside() -> StandAside:
    return StandAside()


def test_one_in_so_many_runs_is_tried_as_a_whole(aside: StandAside) -> None:
    assert not aside.leaves_alone(request("r0"))
    aside.report(request("r0"), LOSES)
    found = [[aside.leaves_alone(request(f"r{at}")) for _ in range(3)] for at in range(1, 3 * TRIED + 1)]
    assert found == [3 * [True]] * (TRIED - 1) + [3 * [False]] + [3 * [True]] * (2 * TRIED - 1) + [3 * [False]]


def test_requests_without_a_run_are_tried_one_by_one(aside: StandAside) -> None:
    aside.report(request(), LOSES)
    found = [aside.leaves_alone(request()) for _ in range(3 * TRIED)]
    assert found == [True] * (TRIED - 1) + [False] + [True] * (2 * TRIED - 1) + [False]


def test_the_more_tries_have_shown_nothing_the_fewer_there_are_up_to_a_bound(aside: StandAside) -> None:
    aside.report(request(), LOSES)
    tried = [at for at in range(8 * MAX_TRIED) if not aside.leaves_alone(request())]
    gaps = [after - before for before, after in pairwise(tried)]
    assert gaps[:4] == [2 * TRIED, 4 * TRIED, 8 * TRIED, 16 * TRIED]
    assert gaps[4:] and set(gaps[4:]) == {MAX_TRIED}


def test_a_workflow_that_wins_again_is_left_alone_no_longer(aside: StandAside) -> None:
    aside.report(request("r0"), LOSES)
    assert aside.leaves_alone(request("r1")) and not aside.leaves_alone(request("r1", "other"))
    aside.report(request("r0"), LOSES)
    assert aside.leaves_alone(request("r1")), "what is reported again changes nothing"
    aside.report(request("r0"), PAYS)
    assert not aside.leaves_alone(request("r2"))


def test_an_agent_is_passed_over_some_times_then_asked_about_again(aside: StandAside) -> None:
    assert not aside.declines(request())
    aside.report(request(), DECLINED)
    assert [aside.declines(request()) for _ in range(TRIED)] == [True] * (TRIED - 1) + [False]
    assert not aside.leaves_alone(request()), "nothing is said of its workflow"
    assert aside.declines(request()) and not aside.declines(request(agent="b"))
    aside.report(request(), PAYS)
    assert not aside.declines(request())


@pytest.mark.parametrize(("one", "other", "both"), [(True, True, True), (True, False, False), (False, False, False)])
def test_an_agent_is_declined_where_all_ranks_decline_it(one: bool, other: bool, both: bool) -> None:
    verdicts = [DECLINED if is_declined else PAYS for is_declined in (one, other)]
    assert verdicts[0].merged(verdicts[1]).is_declined is both
