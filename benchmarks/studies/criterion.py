"""KVCOMM, Table A.3: the criterion of shareability."""

from __future__ import annotations

from benchmarks.lab.methods import Method, method_named
from benchmarks.studies.study import Note, Plot, Row, Study, StudySettings, compared, picked
from kedge.anchors.registry import CRITERIA
from kedge.types import ReuseMode

_COLUMNS = ("accuracy", "same_final_answer", "reuse_rate", "reused_tokens")


def measure(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for `interpolate` and `token` with every criterion; pools fill as they do in use."""
    methods = {
        f"{estimator}, {criterion}": Method(ReuseMode.TRANSLATE, {**anchors, "criterion": criterion}, planner)
        for estimator, anchors, planner in (
            ("interpolate", method_named("kvcomm").anchors, method_named("kvcomm").planner),
            ("token", method_named("token").anchors, method_named("token").planner),
        )
        for criterion in CRITERIA
    }
    summaries = compared(settings, seed, methods, note, forced=False)
    rows: list[Row] = []
    for name, one in summaries.items():
        estimator, criterion = name.split(", ")
        dense = {"accuracy_dense": one.accuracy_dense}
        rows.append({"estimator": estimator, "criterion": criterion, **dense, **picked(one, *_COLUMNS)})
    return rows


STUDY = Study(
    "criterion",
    "Accuracy and reuse by criterion",
    "Table A.3, MMLU, 4 agents: length alone 62.1 % at 93.3 % reuse, length and entropy (Eq. 5) 68.0 % at 70.1 %. "
    "`error` and `leverage` are not in the paper.",
    measure,
    Plot("criterion", ("accuracy", "reuse_rate"), "estimator"),
    quick={"questions": 8},
)
