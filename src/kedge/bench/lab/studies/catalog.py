"""All studies by name, the most telling ones first."""

from __future__ import annotations

from collections.abc import Mapping

from kedge.bench.lab.studies import (
    ablation,
    accuracy,
    anchors,
    criterion,
    estimators,
    first,
    frontier,
    memory,
    offload,
    offsets,
    order,
    proximity,
    sensitivity,
    similarity,
    unseen,
)
from kedge.bench.lab.studies.study import Study

_MODULES = (
    accuracy, frontier, first, estimators, ablation, similarity, proximity, memory, offload, order, criterion,
    sensitivity, anchors, unseen, offsets,
)  # fmt: skip
STUDIES: Mapping[str, Study] = {module.STUDY.name: module.STUDY for module in _MODULES}
