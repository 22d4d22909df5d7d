"""The papers' tables and figures that forced answers cannot tell, each as a study."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from benchmarks.lab.comparison import LabSettings, run_pairs
from benchmarks.studies.roles import ROLES_STUDY
from benchmarks.studies.study import Note, Plot, Row, Study, StudySettings, asked, compared, noted, picked, team_sizes
from kedge.workloads.base import Question

ACCURACY_METHODS = ("dense", "epic", "cacheblend", "relay", "kvcomm", "token", "kedge")
_TEAMS, _QUICK_TEAMS = (2, 3, 4, 5), (2, 3)
_JUDGED = (
    "accuracy",
    "same_final_answer",
    "flips",
    "judge_consistency",
    "computed_tokens",
    "reuse_rate",
    "ttft_ms",
    "teams_per_minute",
)
_NOTES = (
    "–: not comparable. CacheBlend and RelayCaching run tokens through the first layers twice here, as an experiment.",
    "computed tokens: of the prompts, in all layers; not what CacheBlend and RelayCaching compute to choose them.",
    "teams per minute: one team at a time, learning and base prefills behind its answers included.",
    "role-last: other prompts; what it differs in from dense prefill is the prompts' effect. The bundled model "
    "has not learned them.",
    "flips: share of calls that begin with another function than by dense prefill, or with prose in place of one.",
)


def measure_accuracy(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for every method and number of agents; `dense` repeats dense prefill, the ceiling."""
    rows: list[Row] = []
    for agents in team_sizes(settings, _QUICK_TEAMS if settings.quick else _TEAMS):
        team = replace(settings, agents=agents)
        methods, say = settings.methods or ACCURACY_METHODS, noted(note, f"{agents} agents")
        summaries = compared(team, seed, methods, say)
        rows += [
            {"agents": agents, "method": name, "accuracy_dense": one.accuracy_dense, **picked(one, *_JUDGED)}
            for name, one in summaries.items()
        ]
    return rows


ACCURACY_STUDY = Study(
    "accuracy",
    "Accuracy, cost and speed by number of agents",
    "Table 1, 2 to 5 agents. MMLU: dense 47.1, 66.7, 68.0, 69.9 %, CacheBlend 65.4, 65.4, 65.4, 67.3 %, KVCOMM 64.7, "
    "68.6, 68.0, 69.9 % (reuse 74.5, 69.9, 70.1, 67.6 %). GSM8K: dense 81.1, 82.4, 82.1, 81.7 %, CacheBlend 82.0, "
    "75.1, 65.1, 57.1 %, KVCOMM 81.5, 81.7, 80.6, 79.6 % (reuse 79.6, 77.0, 73.4, 71.0 %). HumanEval: dense 86.3, "
    "83.9, 84.5, 85.1 %, CacheBlend 31.1, 21.1, 30.4, 32.9 %, KVCOMM 81.4, 83.2, 83.2, 83.2 % (reuse 87.6, 84.7, "
    "81.1, 77.8 %).",
    measure_accuracy,
    Plot("agents", ("accuracy", "same_final_answer", "judge_consistency", "computed_tokens"), "method"),
    default={"agents": 0},
    quick={"agents": 0, "questions": 8},
    notes=_NOTES,
)


ORDER_METHODS = ("kvcomm", "token")
_ORDERED = ("accuracy_dense", "accuracy", "same_final_answer", "reuse_rate")


def measure_order(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for every order and method."""
    workload, questions = asked(settings, seed)
    lab = LabSettings(agents=settings.agents, model=settings.model, seed=seed)
    rows: list[Row] = []
    for name, order in _orders(seed).items():
        note(name)
        runs = run_pairs(workload, order(questions), settings.methods or ORDER_METHODS, lab)
        rows += [{"order": name, "method": method, **picked(one.summary(), *_ORDERED)} for method, one in runs.items()]
    return rows


def _orders(seed: int) -> dict[str, Callable[[list[Question]], list[Question]]]:
    def mixed(draw: int) -> Callable[[list[Question]], list[Question]]:
        return lambda questions: random.Random(f"{seed}/{draw}").sample(questions, len(questions))

    def length(question: Question) -> int:
        return len(question.text)

    return {
        "random 1": mixed(1),
        "random 2": mixed(2),
        "ascending": lambda questions: sorted(questions, key=length),
        "descending": lambda questions: sorted(questions, key=length, reverse=True),
    }


ORDER_STUDY = Study(
    "order",
    "Accuracy and reuse by order of the questions",
    "Table 4, MMLU, 4 agents, dense 68.0 %: two random orders 68.0 and 72.5 %, ascending length 67.3 %, descending "
    "66.0 %.",
    measure_order,
    Plot("order", ("accuracy", "reuse_rate"), "method"),
    quick={"questions": 6},
)


_ALL = (ACCURACY_STUDY, ORDER_STUDY, ROLES_STUDY)
STUDIES: Mapping[str, Study] = {one.name: one for one in _ALL}
"""All studies by name, the most telling ones first."""
