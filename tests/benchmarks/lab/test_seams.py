"""Reuse without anchors: which tokens are computed, and that the others are base KV at its place."""

from __future__ import annotations

import pytest

from benchmarks.lab.methods import WHOLE, NoAnchors, Seams
from kedge.engine.local.components import EngineComponents
from kedge.types import Source
from tests.benchmarks.lab.test_baselines import HINT, LAST, PHI, PREFIX, served

VALUES = [*range(PHI.start, PHI.stop), *range(HINT.start, HINT.stop)]
TEMPLATE = [*range(PREFIX.start, PREFIX.stop), *range(LAST.start, LAST.stop + 1)]


@pytest.mark.parametrize(
    ("seams", "computed"),
    [
        (Seams(0), [75]),
        (Seams(2), [57, 58, 74, 75]),
        (Seams(WHOLE), TEMPLATE),
        (Seams(WHOLE, inputs=False), sorted(VALUES + TEMPLATE)),
    ],
)
def test_the_ends_of_prefix_segments_are_computed(seams: Seams, computed: list[int]) -> None:
    _, sequence, _ = served(EngineComponents(NoAnchors, seams))
    assert [at for at in sequence.plan.computed if at >= PHI.start] == computed
    kept = {span.source for span in sequence.plan.spans if span.start >= PHI.start}
    assert (Source.TRANSLATED in kept) == (len(computed) < len(VALUES + TEMPLATE))
