"""Fidelity on a real model: every method and yardstick lies where it was measured, give or take another CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kedge.bench.fidelity import FidelitySettings, measure
from kedge.bench.probe import SERVED
from kedge.workloads import real
from tests.real import RealModel

BANDS = {
    "dense": (0.0, 1e-6),
    "exact": (0.0, 1e-6),
    "bf16": (0.0, 1e-4),
    "fp8 e4m3": (0.0003, 0.006),
    "int4": (0.01, 0.15),
    "kedge": (0.005, 0.08),
    "token": (0.0003, 0.02),
}
"""Least and most KL to dense prefill, in nats a token. Anchors after five samples are nearer than moved values."""


def measured(smollm2: RealModel, methods: tuple[str, ...], **sizes: int) -> dict[str, float]:
    """Return the KL of `methods` and of the yardsticks on `reading`."""
    engine: Mapping[str, Any] = {"dtype": "float32", "device": "cpu", "kv_memory": "256 blocks"}
    settings = FidelitySettings(smollm2.path, timed=0, at_once=4, engine=engine, **sizes)
    found = measure(*real.load("reading"), {name: SERVED[name] for name in methods}, settings)
    return {name: one["kl"] for name, one in (found["yardsticks"] | found["methods"]).items()}


def outside(kl: dict[str, float]) -> dict[str, float]:
    """Return what is not in its band."""
    return {name: kl[name] for name, (low, high) in BANDS.items() if name in kl and not low <= kl[name] <= high}


@pytest.mark.slow
def test_methods_and_yardsticks_are_in_their_bands(smollm2: RealModel) -> None:
    kl = measured(smollm2, ("dense", "exact", "kedge", "token"), questions=4, taught=5, tokens=16)
    assert outside(kl) == {} and kl["token"] < kl["kedge"]


def test_one_question_is_in_the_bands(smollm2: RealModel) -> None:
    assert outside(measured(smollm2, ("exact", "kedge"), questions=1, taught=0, tokens=8)) == {}
