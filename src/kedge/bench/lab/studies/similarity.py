"""KVCOMM, figure A.12: similarity of reused KV with that of dense prefill, layer by layer, against plain reuse."""

from __future__ import annotations

from kedge.anchors.registry import ESTIMATORS
from kedge.bench.lab.studies.estimators import alike
from kedge.bench.lab.studies.study import Note, Plot, Row, Study, StudySettings, compared

_QUICK = ("interpolate", "token", "linear+token")


def measure(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for every method and layer, over all tokens from the first placeholder on, forced to the dense
    answers.
    """
    methods = alike(*(_QUICK if settings.quick else ESTIMATORS))
    summaries = compared(settings, seed, methods, note, taught=True, closed=False, kv=True)
    return [
        {
            "method": name,
            "layer": layer,
            "cosine_keys": one.cosine.keys[layer],
            "cosine_values": one.cosine.values[layer],
            "error_keys": one.error.keys[layer],
            "error_values": one.error.values[layer],
        }
        for name, one in summaries.items()
        if one.cosine and one.error
        for layer in range(len(one.cosine.keys))
    ]


STUDY = Study(
    "similarity",
    "Cosine with and relative error against dense KV, by layer",
    "Figure A.12, HumanEval, 4 agents: cosine of about 0.92 (keys) and 0.95 (values) for L2 and cosine weights, and "
    "small errors in all layers; the nearest anchor alone deviates much in deep layers. "
    "`rotation` is plain reuse here: base KV at its new position, no offsets.",
    measure,
    Plot("layer", ("cosine_keys", "cosine_values", "error_keys", "error_values"), "method", "lines"),
)
