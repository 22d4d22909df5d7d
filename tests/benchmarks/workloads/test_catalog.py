"""The picks of the bundled teams' judges: what the guard compares is what the tasks score."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest

from benchmarks.workloads import catalog, mathematics, mmlu
from kedge.decisions import PROSE, first_decision, pick_of
from kedge.workloads.base import Team
from kedge.workloads.gsm8k import GSM8K
from kedge.workloads.miniature import TASKS

DATASETS: dict[str, tuple[Team, tuple[str, ...]]] = {
    "mmlu": (mmlu.TEAM, ("A fits. The answer is B.", "The answer is **(B)**, as A fails.", "The answer is\nC.")),
    "gsm8k": (
        GSM8K,
        ("5 + 7. The answer is 1,200.50.", "The answer is 12 of 13\n", "The answer is **$8**"),
    ),
    "math500": (mathematics.MATH500, (r"\boxed{1} no: \boxed{\frac{1}{2}} of it", r"$\boxed{x^{2}}$")),
    "aime": (mathematics.AIME, (r"It is \boxed{042}.",)),
}
WITHOUT = {"code", "humaneval", "reading", "reading-picks", "reading-long"}
"""Teams whose last agent answers with code or a text as a whole"""


def judge_pick(team: Team) -> str:
    return team.workflow().agents[-1].pick


def test_of_every_team_only_the_judge_has_a_pick() -> None:
    for name in catalog.NAMES:
        team = TASKS[name] if name in TASKS else DATASETS[name][0] if name in DATASETS else None
        if team is not None:
            *others, _ = team.workflow().agents
            assert not any(agent.pick for agent in others)
            assert bool(judge_pick(team)) is (name not in WITHOUT)
        else:
            assert name in WITHOUT


@pytest.mark.parametrize("name", DATASETS)
def test_a_judges_pick_is_what_its_answer_is_scored_by(name: str) -> None:
    team, answers = DATASETS[name]
    for answer in answers:
        assert (pick_of(answer, judge_pick(team)) or "").upper() == (team.final(answer) or "?").upper()


@pytest.mark.parametrize("name", sorted(TASKS.keys() - WITHOUT))
def test_a_generated_tasks_picks_differ_where_its_decisions_do(name: str) -> None:
    task = TASKS[name]
    pick, rng = judge_pick(task), Random(0)
    for question in islice(task.questions("test", 0), 40):
        right = task.roles[-1].reference(question)
        for answer in (right, task.corrupt(rng, right)):
            is_prose = first_decision(answer) == PROSE
            assert pick_of(answer, pick) == ((task.final(answer) or "?").casefold() if is_prose else None)
