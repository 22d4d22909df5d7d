"""KVCOMM, Table A.4, and learning curves: estimators that share the same values, so that only offsets differ.

Every method holds the same samples, shares by length alone and recomputes one token, so all have one reuse rate.
Methods that compute `weak` tokens learn which these are, as Kedge does by default, and share every value.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.lab.methods import Method, method_named
from benchmarks.studies.study import Note, Plot, Row, Study, StudySettings, compared, picked
from kedge.anchors.registry import ESTIMATORS
from kedge.settings import PlannerSettings, estimator_settings
from kedge.types import ReuseMode

_CURVE, _QUICK_CURVE = (2, 5, 10, 20, 40), (2, 6)
_TRAILING = ("rotation", "interpolate", "token", "linear")
_WEAK = {"criterion": "error", "max_error": 1e9, "min_anchors": 2}
_QUICK = ("interpolate", "token", "linear+token")
_COLUMNS = (
    "forced_reuse_rate",
    "forced_reused_tokens",
    "kl",
    "top1",
    "judge_consistency",
    "accuracy",
    "same_final_answer",
)


def alike(*estimators: str) -> dict[str, Method]:
    """Return rotation without offsets, and estimators that share every value for which two anchors are long enough.

    `token` also comes with offsets in 8 bits, some also with a trail behind each value, and the paper's and Kedge's
    default then also with weak tokens computed.
    """
    planner = method_named("kvcomm").planner
    methods = {"rotation": method_named("rotation")}
    for name in estimators:
        anchors = {**estimator_settings(name), "criterion": "length"}
        methods[name] = Method(ReuseMode.TRANSLATE, anchors, planner)
    if "token" in methods:
        token = methods["token"]
        methods["token, 8 bits"] = replace(token, anchors={**token.anchors, "offset_bits": 8})
    trailing = {name: methods[name] for name in _TRAILING if name in methods}
    with_trail = {**planner, "trail": PlannerSettings().trail}
    kept = {f"{name}, trail": replace(one, planner=with_trail) for name, one in trailing.items()}
    weak = {
        f"{name}, trail, weak": replace(kept[f"{name}, trail"], anchors={**methods[name].anchors, **_WEAK})
        for name in ("interpolate", "token")
        if name in methods
    }
    return methods | kept | weak


def measure(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for every number of samples and estimator; accuracy and the judge only for the largest number."""
    methods = alike(*(_QUICK if settings.quick else ESTIMATORS))
    curve = _QUICK_CURVE if settings.quick else _CURVE
    rows: list[Row] = []
    for taught in curve:
        last = taught == curve[-1]
        learned = replace(settings, taught=taught)
        note(f"{taught} samples")
        anchors = {"capacity": curve[-1]}
        summaries = compared(learned, seed, methods, note, taught=True, judged=last, closed=last, anchors=anchors)
        rows += [{"samples": taught, "estimator": name, **picked(one, *_COLUMNS)} for name, one in summaries.items()]
    return rows


STUDY = Study(
    "estimators",
    "Estimators at the same reuse rate, by number of samples learned from",
    "Table A.4, HumanEval, 4 agents, dense 84.45 %: nearest 47.20 % (reuse 78.9 %), cosine 83.23 % (82.5 %), "
    "the paper's softmax over L2 distances 83.23 % (81.1 %). The other estimators and the curve are not in the paper.",
    measure,
    Plot("samples", ("kl", "top1"), "estimator", "lines"),
)
