"""All studies by name, the most telling ones first."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.studies import (
    ablation,
    accuracy,
    anchors,
    criterion,
    estimators,
    frontier,
    offsets,
    order,
    sensitivity,
)
from benchmarks.studies.study import Study

_MODULES = (
    accuracy, frontier, estimators, ablation, order, criterion, sensitivity, anchors, offsets,
)  # fmt: skip
STUDIES: Mapping[str, Study] = {module.STUDY.name: module.STUDY for module in _MODULES}
