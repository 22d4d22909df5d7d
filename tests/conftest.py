"""One thread per operation: the tensors are tiny, and on a busy machine two threads mostly wait for each other.

Nor is any example of Hypothesis, or the making of one, too slow there.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.real import RealModel

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("push", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("all", settings.get_profile("push"), max_examples=100)
settings.load_profile("push")


def _without_proof() -> None:
    """Let translation serve at once in engines that a test opens without saying how near it has to be: most tests are
    about what translation does, and proof takes an agent's first calls. Tests of the default say `fidelity`.
    """
    from math import inf

    from kedge.settings import EngineSettings, GuardSettings, Settings

    GuardSettings.model_fields["fidelity"].default = inf
    GuardSettings.model_rebuild(force=True)
    EngineSettings.model_fields["guard"].default = GuardSettings()
    EngineSettings.model_rebuild(force=True)
    Settings.model_fields["engine"].default = EngineSettings()
    Settings.model_rebuild(force=True)


_without_proof()


@pytest.fixture(scope="session")
def smollm2() -> RealModel:
    """SmolLM2-135M-Instruct in float32, see `tests.real`; skips where it is not installed."""
    from tests.real import RealModel, missing

    if why := missing():
        pytest.skip(why)
    return RealModel()
