from __future__ import annotations

from itertools import islice

import pytest

from benchmarks.workloads.peer import Peer, questions
from kedge.bench.copy_machine import LEAD, TAIL, CopyMachine
from kedge.engine.echo import EchoEngine
from kedge.errors import WorkflowError
from kedge.runner.run import run
from kedge.workloads.base import QUESTION


def test_the_team_is_a_chain_that_answers() -> None:
    flow = Peer().workflow()
    assert flow.order == ("planner", "executor", "expresser", "reviewer")
    for before, agent in zip(flow.agents, flow.agents[1:], strict=False):
        assert {p.name for p in agent.placeholders} == {QUESTION, f"agent_{before.id}_current"}
    answers = {"planner": "1. look", "executor": "1. found", "expresser": "It is so.", "reviewer": "Send it."}
    result = run(EchoEngine(answers), flow, {QUESTION: next(questions()).text})
    assert Peer().final(result.text) == "Send it."
    with pytest.raises(WorkflowError):
        Peer().workflow(3)


def test_questions_repeat_by_seed_and_differ_among_each_other() -> None:
    first = [question.text for question in islice(questions(1), 50)]
    assert first == [question.text for question in islice(questions(1), 50)]
    assert first != [question.text for question in islice(questions(2), 50)]
    assert len(set(first)) > 40
    assert not any("{" in text for text in first)


def test_the_copy_machine_reads_everything_that_was_said() -> None:
    machine = CopyMachine(agents=3, prefix=20, vocab=100)
    question, answers = machine.tokens(9), [machine.tokens(5), machine.tokens(6)]
    request = machine.request("run", 2, question, answers)
    assert [s.name for s in request.segments] == [
        "p0", "user_question", "p1", "agent_0_current", "p2", "agent_1_current", "p3",
    ]  # fmt: skip
    assert request.prompt_tokens == 20 + 9 + LEAD + 5 + LEAD + 6 + TAIL
    assert request.segments[3].tokens == answers[0]
    again = machine.request("other", 2, question, answers)
    assert again.tokens == request.tokens
    assert all(2 <= token < 100 for token in request.tokens)
    assert (
        CopyMachine(3, 20, 100).request("r", 0, (), []).segments[0]
        == CopyMachine(3, 20, 100).request("s", 0, (), []).segments[0]
    )
