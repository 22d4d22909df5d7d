"""KVCOMM, Table 4: the same questions in several orders. Pools fill as they do in use."""

from __future__ import annotations

import random
from collections.abc import Callable

from benchmarks.lab.comparison import LabSettings, run_pairs
from benchmarks.studies.study import Note, Plot, Row, Study, StudySettings, asked, picked
from kedge.workloads.base import Question

METHODS = ("kvcomm", "token")
_COLUMNS = ("accuracy_dense", "accuracy", "same_final_answer", "reuse_rate")


def measure(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for every order and method."""
    workload, questions = asked(settings, seed, taught=False)
    lab = LabSettings(agents=settings.agents, model=settings.model, forced=False, seed=seed)
    rows: list[Row] = []
    for name, order in _orders(seed).items():
        note(name)
        runs = run_pairs(workload, order(questions), settings.methods or METHODS, lab)
        rows += [{"order": name, "method": method, **picked(one.summary(), *_COLUMNS)} for method, one in runs.items()]
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


STUDY = Study(
    "order",
    "Accuracy and reuse by order of the questions",
    "Table 4, MMLU, 4 agents, dense 68.0 %: two random orders 68.0 and 72.5 %, ascending length 67.3 %, descending "
    "66.0 %.",
    measure,
    Plot("order", ("accuracy", "reuse_rate"), "method"),
    quick={"questions": 6},
)
