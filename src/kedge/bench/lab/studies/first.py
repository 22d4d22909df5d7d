"""The first question of a new team: what its agents can translate when nothing was learned yet."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from types import MappingProxyType

from kedge.bench.lab.comparison import LabSettings, run_pairs
from kedge.bench.lab.methods import Method, method_named
from kedge.bench.lab.pairs import MethodRuns
from kedge.bench.lab.studies.frontier import ALL, TASKS
from kedge.bench.lab.studies.study import Note, Plot, Row, Study, StudySettings, asked

METHODS = MappingProxyType(
    {
        "always": method_named("kedge"),
        "unlearned": method_named("token"),
        "never": replace(method_named("token"), planner={"move": "never"}),
    }
)
"""What `planner.move` may be"""


def measure(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for every task and method; every question is asked by a team of its own."""
    methods: dict[str, Method] = {name: method_named(name) for name in settings.methods or ()} or dict(METHODS)
    lab = LabSettings(agents=settings.agents, model=settings.model, forced=False, fresh=True, seed=seed)
    rows: list[Row] = []
    for task in TASKS if settings.task == ALL else (settings.task,):
        note(task)
        workload, questions = asked(replace(settings, task=task), seed, taught=False)
        for name, runs in run_pairs(workload, questions, methods, lab).items():
            one = runs.summary()
            found = {"right_dense": one.accuracy_dense, "right": one.accuracy, "same_final": one.same_final_answer}
            shares = {"readers": of_readers(runs), "computed": 1 - (one.reused_tokens or 0.0)}
            rows.append({"task": task, "move": name, **found, **shares})
    return rows


def of_readers(runs: MethodRuns) -> float:
    """Return the share of the calls behind each question's first one that translated something."""
    first = {pair.question: pair.agent for pair in reversed(runs.answers)}
    readers = [pair for pair in runs.answers if pair.agent != first[pair.question]]
    return fmean(pair.other.completion.receipt.translated > 0 for pair in readers)


STUDY = Study(
    "first",
    "The first question of a new team",
    "Not in the paper, which prefills it densely.",
    measure,
    Plot("task", ("right", "readers", "computed"), "move"),
    default={"task": ALL, "questions": 50, "seeds": 1},
    quick={"task": ALL},
)
