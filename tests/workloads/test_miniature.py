"""The bundled model's task: its questions, the wording that the model was trained on, and what counts as right."""

import re
from itertools import islice

import pytest

from kedge.workloads.base import Question
from kedge.workloads.miniature import MATH, MAX, questions


def test_questions_follow_the_seed_and_their_answers_are_right() -> None:
    first, again, other = ([one.text for one in islice(questions(seed), 50)] for seed in (3, 3, 4))
    assert first == again and first != other
    for asked in islice(questions(0), 200):
        start, *steps = (int(number) for number in re.findall(r"\d+", asked.text))
        losses = re.findall(r"(gives away|loses|sells|drops)|(?:buys|finds|gets|wins)", asked.text)
        totals = [start]
        for step, loses in zip(steps, losses, strict=True):
            totals.append(totals[-1] + (-step if loses else step))
        assert str(totals[-1]) == asked.answer and 0 <= min(totals) <= max(totals) <= MAX


def test_the_wording_that_the_model_was_trained_on() -> None:
    team = MATH.workflow()
    assert team.order == ("solver", "analyst", "programmer", "inspector", "final")
    assert team.agent("solver").user == "Question: {user_question}\n\nNow answer as Math Solver."
    assert team.agent("inspector").user == (
        "Question: {user_question}\n\nThe other agents say:"
        "\n\nMath Solver:\n{agent_solver_current}"
        "\n\nMathematical Analyst:\n{agent_analyst_current}"
        "\n\nProgramming Expert:\n{agent_programmer_current}"
        "\nRunning this code prints:\n{condition_programmer_current}"
        "\n\nNow answer as Inspector."
    )


@pytest.mark.parametrize(
    ("agent", "answer", "right"),
    [
        ("final", "The answer is 7.", True),
        ("final", "First the answer is 7, no: the answer is 8.", False),
        ("solver", "7", False),
        ("programmer", "def solve():\n    return 7", None),
    ],
)
def test_the_number_that_is_stated_last_counts(agent: str, answer: str, right: bool | None) -> None:
    assert MATH.right(agent, answer, Question("?", "7")) is right


def test_the_programmers_tool_runs_its_function() -> None:
    tool = MATH.workflow().agent("programmer").tool
    assert tool("def solve():\n    n = 3\n    n += 4\n    return n", {}) == "7"
    assert tool("def solve(:", {}) == "SyntaxError"
