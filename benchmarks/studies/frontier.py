"""Quality against tokens computed: every method and estimator, with the computed share swept.

All methods learn from the same questions before. Every method translates the same calls, so that only what it computes
in them differs. A method is on the frontier of a task if no other one computes as few tokens at as small a KL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.lab.baselines import WHOLE
from benchmarks.lab.methods import Method, cacheblend, epic, method_named, relay, seams
from benchmarks.lab.pairs import Summary
from benchmarks.studies.study import Note, Plot, Row, Study, StudySettings, compared
from kedge.settings import PlannerSettings, estimator_settings
from kedge.types import ReuseMode

ALL = "all"
"""The three miniature tasks, one after the other"""
TASKS = ("choice", "math", "code")
LEVELS = (0.15, 0.3, 0.5, 0.8)
"""Values of `weak_error`"""
FEW_LEVELS = (0.15, 0.5)
ESTIMATED: Mapping[str, tuple[float, ...]] = {"token": LEVELS, "interpolate": FEW_LEVELS, "linear+token": FEW_LEVELS}
QUICK_ESTIMATED = {"token": FEW_LEVELS}
_SHARED: Mapping[str, Any] = {"criterion": "error", "max_error": 1e9, "min_anchors": 2}
_SEAMS = {"0": 0, "4": 4, "all": WHOLE}
_BLENDS = {"10%": (0.15, 0.12, 0.1), "20%": (0.3, 0.25, 0.2), "40%": (0.6, 0.5, 0.4)}
_HEADS = (4, 16, 64)
"""First tokens of every piece that `epic` computes"""
_RELAYS = (0.0, 0.2, 0.4, None)
"""Shares of an answer that `relay` corrects; None: by its thresholds"""


def estimated(name: str, weak_error: float) -> Method:
    """Return an estimator that shares every value it can, and computes tokens above this predicted error."""
    anchors = {**estimator_settings(name), **_SHARED, "weak_error": weak_error}
    planner = {"move": "unlearned", "trail": PlannerSettings().trail, "recompute_short": 0, "min_translated": 0.0}
    return Method(ReuseMode.TRANSLATE, anchors, planner)


def swept(*, quick: bool) -> dict[tuple[str, str], Method]:
    """Return all methods by name and level. A further method, or another level of one, is one more line here."""
    levels = QUICK_ESTIMATED if quick else ESTIMATED
    blends, heads, relays = (("20%",), (16,), (None,)) if quick else (tuple(_BLENDS), _HEADS, _RELAYS)
    return {
        ("kedge", "default"): method_named("kedge"),
        **{(name, f"{level:g}"): estimated(name, level) for name in levels for level in levels[name]},
        **{("seams", level): seams(last) for level, last in _SEAMS.items()},
        ("answers", ""): method_named("answers"),
        ("rotation", ""): method_named("rotation"),
        ("kvcomm", ""): method_named("kvcomm"),
        **{("epic", str(first)): epic(first) for first in heads},
        **{("cacheblend", share): cacheblend(*_BLENDS[share]) for share in blends},
        **{("relay", "" if share is None else f"{share:.0%}"): relay(share) for share in relays},
    }


def measure(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for every task and method."""
    named = {(name, ""): method_named(name) for name in settings.methods or ()}
    methods = {" ".join(key): (key, one) for key, one in (named or swept(quick=settings.quick)).items()}
    rows: list[Row] = []
    for task in TASKS if settings.task == ALL else (settings.task,):

        def note_task(what: str, task: str = task) -> None:
            note(f"{task}, {what}")

        these = {name: one for name, (_, one) in methods.items()}
        summaries = compared(replace(settings, task=task), seed, these, note_task, taught=True, judged=True)
        rows += with_best([_row(task, *methods[name][0], one) for name, one in summaries.items()])
    return rows


def _row(task: str, method: str, level: str, one: Summary) -> Row:
    assert one.forced_reused_tokens is not None
    return {
        "task": task,
        "method": method,
        "level": level,
        "computed": 1 - one.forced_reused_tokens,
        "kl": one.kl,
        "same_final": one.same_final_answer,
        "right": one.accuracy,
        "judge": one.judge_consistency,
    }


def with_best(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of one task with `best`: 1 where no other row computes fewer tokens at as small a KL, or as
    few at a smaller one, else 0. O(n²).
    """
    return [{**row, "best": float(not any(_beats(other, row) for other in rows))} for row in rows]


def _beats(one: Row, other: Row) -> bool:
    ours, theirs = ((row["computed"], row["kl"]) for row in (one, other))
    return ours != theirs and all(a <= b for a, b in zip(ours, theirs, strict=True))


STUDY = Study(
    "frontier",
    "Quality over the share of prompt tokens computed",
    "Not in the paper. It compares with CacheBlend at 20 % only (Table 1).",
    measure,
    Plot("computed", ("kl", "same_final", "judge"), "method", "lines", of="task", log=("kl",)),
    default={"task": ALL, "questions": 12, "taught": 9, "seeds": 1},
    quick={"task": ALL, "questions": 4, "taught": 6},
)
