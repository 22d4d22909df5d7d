"""`kedge demo`: what it makes of two modes' answers, and what it shows and writes."""

from itertools import islice
from pathlib import Path

import pytest

from kedge.bench.demo import TeamScore, compared
from kedge.cli import demo
from kedge.runner.run import AgentResult, RunResult
from kedge.types import AgentId, RunId
from kedge.workloads import miniature
from kedge.workloads.base import Question
from kedge.workloads.miniature import MATH
from tests.cli.commands import measured
from tests.completions import completion


def score(*finals: str, translated: int = 0) -> TeamScore:
    """Answers to as many questions, of which all agents but the last say the same."""

    def result(agent: AgentId, text: str) -> AgentResult:
        return AgentResult(agent, 0, completion(text, translated=translated, computed=10 - translated))

    *others, last = (AgentId(one.id) for one in MATH.agents)
    runs = [RunResult(RunId("r"), (*(result(one, "7") for one in others), result(last, text)), 1.0) for text in finals]
    return TeamScore(MATH, [(Question("?", "7"), run) for run in runs])


def test_answers_are_the_same_by_their_decisions_and_to_the_letter() -> None:
    dense, ours = score("answer is 7", "answer is 7", "none"), score("So the answer is 7", "answer is 8", "none")
    found = compared(dense, ours)
    assert (found["same_final_answer"], found["same_answers"]) == (1 / 3, pytest.approx(10 / 12))
    assert (found["accuracy_dense"], found["accuracy_translated"]) == (2 / 3, 1 / 3)
    accuracies = {one["agent"]: one["accuracy_dense"] for one in found["agents"]}
    assert (accuracies["solver"], accuracies["programmer"]) == (0, None), "without a stated number; without a score"


def test_calls_are_reused_that_translated_a_token() -> None:
    found, none = compared(score("7"), score("7", translated=4)), compared(score("7"), score("7"))
    assert found["reuse_rate"] == found["agents"][1]["reuse_rate"] == 1
    assert found["agents"][1]["tokens"] == {"exact": 0, "translated": 4, "computed": 6}
    gains = [list(demo.score_table(one["agents"]).renderables[-1].columns[3].cells) for one in (found, none)]
    assert gains[0][1].endswith("x") and {*gains[1]} == {"-"}, "another time without translated tokens is noise"


def test_the_command_writes_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = list(islice(miniature.questions(11), 2))
    monkeypatch.setattr("kedge.bench.demo.questions", lambda _: two)
    data, shown = measured(tmp_path, "demo", "--questions", "3")
    assert data["questions"] == 2, "as many as there are"
    assert {one["agent"] for one in data["agents"]} == {agent.id for agent in MATH.agents}
    assert all(one["ttft_dense_ms"] > 0 < one["ttft_translated_ms"] for one in data["agents"])
    assert "toy" in shown, "nobody takes its answers for more"
