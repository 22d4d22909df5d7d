"""KVCOMM, Table 5: rotation, offsets of placeholders and offsets of prefix segments, in all combinations."""

from __future__ import annotations

from itertools import product

from benchmarks.lab.methods import ablation
from benchmarks.studies.study import Note, Plot, Row, Study, StudySettings, compared, picked

_STEPS = [steps for steps in product((True, False), repeat=3) if any(steps)]
_QUICK_STEPS = [(True, True, True), (False, True, True), (True, False, True), (True, True, False), (True, False, False)]
_COLUMNS = ("kl", "top1", "accuracy", "same_final_answer", "reuse_rate")


def measure(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for every combination of steps in the paper's table."""
    chosen = _QUICK_STEPS if settings.quick else _STEPS
    methods = {_name(*steps): ablation(rotation=steps[0], values=steps[1], prefixes=steps[2]) for steps in chosen}
    summaries = compared(settings, seed, methods, note, taught=True)
    return [{"steps": name, **picked(one, *_COLUMNS)} for name, one in summaries.items()]


def _name(*steps: bool) -> str:
    return " + ".join(word for word, taken in zip(("rotation", "φ", "prefix"), steps, strict=True) if taken)


STUDY = Study(
    "ablation",
    "The three steps of alignment, one by one",
    "Table 5, MMLU, 4 agents: all three steps 68.0 %; two of them 38.6, 62.1 (rotation + prefix) and 56.9 %; a single "
    "one 43.1, 58.8 and 60.1 %.",
    measure,
    Plot("steps", ("kl", "accuracy")),
)
