"""Fidelity on a real model: every method and yardstick lies where it was measured, give or take another CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kedge.bench.fidelity import FidelitySettings, measure
from kedge.bench.probe import SERVED
from kedge.workloads import real
from tests.real import RealModel

SAME = (0.0, 1e-6)


def measured(smollm2: RealModel, methods: tuple[str, ...], **sizes: int) -> dict[str, float]:
    """Return the KL of `methods` and of the yardsticks on `reading`."""
    engine: Mapping[str, Any] = {"dtype": "float32", "device": "cpu", "num_blocks": 256}
    settings = FidelitySettings(smollm2.path, timed=0, at_once=4, engine=engine, **sizes)
    found = measure(*real.load("reading"), {name: SERVED[name] for name in methods}, settings)
    return {name: one["kl"] for name, one in (found["yardsticks"] | found["methods"]).items()}


@pytest.mark.slow
def test_methods_and_yardsticks_are_in_their_bands(smollm2: RealModel) -> None:
    kl = measured(smollm2, ("dense", "exact", "kedge", "token"), questions=4, taught=5, tokens=16)
    bands = {
        "dense": SAME,
        "exact": SAME,
        "fp8 e4m3": (0.0003, 0.006),
        "int4": (0.01, 0.15),
        "kedge": (0.005, 0.08),
        "token": (0.0003, kl["kedge"]),
    }
    assert {name: kl[name] for name, (low, high) in bands.items() if not low <= kl[name] <= high} == {}


def test_moved_values_are_near_dense_on_one_question(smollm2: RealModel) -> None:
    kl = measured(smollm2, ("exact", "kedge"), questions=1, taught=0, tokens=8)
    assert kl["exact"] <= 1e-6 and kl["bf16"] < 1e-3 and 1e-4 < kl["kedge"] < 0.15
