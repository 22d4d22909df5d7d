"""Workflows that translation makes slower: which of their runs are left alone."""

from __future__ import annotations

from itertools import pairwise

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kedge.integrations.vllm.plugin.translations import MAX_TRIED, TRIED, LosingWorkflows
from kedge.types import GenerateRequest, RunId, Segment, WorkflowId


def request(run: str, workflow: str = "w") -> GenerateRequest:
    return GenerateRequest((Segment((5,), "p0"),), run=RunId(run), workflow=WorkflowId(workflow))


def test_one_in_so_many_runs_is_tried_as_a_whole() -> None:
    losing = LosingWorkflows()
    assert not losing.leaves_alone(request("r0"))
    losing.report(request("r0"), is_losing=True)
    found = [[losing.leaves_alone(request(f"r{at}")) for _ in range(3)] for at in range(1, 3 * TRIED + 1)]
    assert found == [3 * [True]] * (TRIED - 1) + [3 * [False]] + [3 * [True]] * (2 * TRIED - 1) + [3 * [False]]


def test_requests_without_a_run_are_tried_one_by_one() -> None:
    losing = LosingWorkflows()
    losing.report(request(""), is_losing=True)
    found = [losing.leaves_alone(request("")) for _ in range(3 * TRIED)]
    assert found == [True] * (TRIED - 1) + [False] + [True] * (2 * TRIED - 1) + [False]


def test_the_more_tries_have_shown_nothing_the_fewer_there_are_up_to_a_bound() -> None:
    losing = LosingWorkflows()
    losing.report(request(""), is_losing=True)
    tried = [at for at in range(8 * MAX_TRIED) if not losing.leaves_alone(request(""))]
    gaps = [after - before for before, after in pairwise(tried)]
    assert gaps[:4] == [2 * TRIED, 4 * TRIED, 8 * TRIED, 16 * TRIED]
    assert gaps[4:] and set(gaps[4:]) == {MAX_TRIED}


def test_a_workflow_that_wins_again_is_left_alone_no_longer() -> None:
    losing = LosingWorkflows()
    losing.report(request("r0"), is_losing=True)
    assert losing.leaves_alone(request("r1")) and not losing.leaves_alone(request("r1", "other"))
    losing.report(request("r0"), is_losing=True)
    assert losing.leaves_alone(request("r1")), "what is reported again changes nothing"
    losing.report(request("r0"), is_losing=False)
    assert not losing.leaves_alone(request("r2"))
