"""KVCOMM, figures 1 and A.4 to A.11: how the offsets of one message vary over ten prefixes, layer by layer."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from benchmarks.studies.contexts import Contexts
from benchmarks.studies.study import Note, Plot, Row, Study, StudySettings
from benchmarks.workloads.catalog import load
from kedge.kv.segment import KVSegment

_PREFIXES = 10
_PARTS = ("keys", "values")


def measure(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for every layer, of keys and of values, in units of the norm of the base KV.

    `size` is the mean norm of an offset, `variation` the spread (standard deviation) of offsets over the prefixes, and
    `small` the share of elements below 0.1.
    """
    _, questions = load(settings.task, settings.dataset, seed)
    message, *prefixes = (question.text for question in islice(questions, 1 + _PREFIXES))
    with Contexts(settings) as contexts:
        tokens = contexts.bare(message)
        base = contexts.kv(contexts.start(), tokens)
        note(f"{len(tokens)} tokens behind {_PREFIXES} prefixes")
        real = [contexts.kv(contexts.encode(prefix), tokens) for prefix in prefixes]
    return [row for part in _PARTS for row in _layers(part, base, real)]


def _layers(part: str, base: KVSegment, real: list[KVSegment]) -> list[Row]:
    before: Tensor = getattr(base, part)
    offsets = torch.stack([getattr(one, part) - before for one in real])
    norm = before.flatten(2).norm(dim=2)
    size = (offsets.flatten(3).norm(dim=3) / norm).mean((0, 2))
    variation = (offsets.std(0).flatten(2).norm(dim=2) / norm).mean(1)
    small = (offsets.abs() < 0.1).float().mean((0, 2, 3, 4))
    return [
        {"part": part, "layer": layer, "size": float(size[layer]), "variation": float(variation[layer]),
         "small": float(small[layer])}
        for layer in range(len(before))
    ]  # fmt: skip


STUDY = Study(
    "offsets",
    "Offsets of one message behind ten prefixes",
    "Figure 1 and A.4 to A.11: offsets of one text vary considerably over prefixes; over ten samples those "
    "of prefix segments are larger but vary less than those of placeholders, above all in deep "
    "layers (plots). About half of all elements are below 0.1.",
    measure,
    Plot("layer", ("size", "variation", "small"), "part", "lines"),
)
