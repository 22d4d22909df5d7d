"""KVCOMM, Table 6: the entropy threshold γ and the pool size V, with the paper's design as published.

Also, not in the paper, the predicted error w above which `token` computes single tokens.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.lab.methods import method_named
from benchmarks.studies.study import Note, Plot, Row, Study, StudySettings, compared, picked

_GAMMAS, _QUICK_GAMMAS = (0.1, 0.3, 0.5, 0.7, 0.9), (0.1, 0.3, 0.7)
_SIZES, _QUICK_SIZES = (5, 10, 15, 20, 25), (5, 10)
_WEAK, _QUICK_WEAK = (0.1, 0.15, 0.2, 0.25, 0.4, 1e9), (0.15, 1e9)
_COLUMNS = ("accuracy", "same_final_answer", "reuse_rate", "reused_tokens")


def measure(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for every γ (V = 20), then for every V (γ = 0.3) and for every w; pools fill as they do in use."""
    published, token = method_named("kvcomm"), method_named("token")
    points = [(published, "γ", "gamma", gamma) for gamma in (_QUICK_GAMMAS if settings.quick else _GAMMAS)]
    points += [(published, "V", "capacity", size) for size in (_QUICK_SIZES if settings.quick else _SIZES)]
    points += [(token, "token, w", "weak_error", error) for error in (_QUICK_WEAK if settings.quick else _WEAK)]
    methods = {
        f"{label} = {value:g}": replace(method, anchors={**method.anchors, key: value})
        for method, label, key, value in points
    }
    summaries = compared(settings, seed, methods, note, forced=False)
    return [
        {"setting": name, "accuracy_dense": one.accuracy_dense, **picked(one, *_COLUMNS)}
        for name, one in summaries.items()
    ]


STUDY = Study(
    "sensitivity",
    "Accuracy and reuse by γ and V, and by what is computed of a value",
    "Table 6, GSM8K, 4 agents, dense 82.1 %: γ = 0.1, 0.3, 0.5, 0.7, 0.9 give 83.1, 80.6, 80.0, 78.9, 78.8 % at 34.3, "
    "73.4, 94.9, 97.5, 98.2 % reuse; V = 5, 10, 15, 20, 25 give 82.0, 81.4, 81.2, 80.6, 80.6 % at 44.0, 60.3, 66.2, "
    "73.4, 73.4 %. w is not in the paper.",
    measure,
    Plot("setting", ("accuracy", "reuse_rate")),
    quick={"questions": 8},
)
