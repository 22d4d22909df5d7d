"""The embedded engine passes the suite that every engine must pass, whole prompts at once and in small chunks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kedge.config import TierConfig
from kedge.engine.conformance import EngineConformance
from kedge.engine.local.engine import LocalEngine
from tests.engine.local.conftest import engine_of, tiny_model


class TestLocalEngine(EngineConformance):
    @pytest.fixture(scope="class")
    def engine(self) -> Iterator[LocalEngine]:
        with engine_of(tiny_model("llama")) as engine:
            yield engine


class TestLocalEngineWithAHostTier(EngineConformance):
    @pytest.fixture(scope="class")
    def engine(self) -> Iterator[LocalEngine]:
        tiers = TierConfig(host_blocks=64, backup_hits=0, throttle=1e-4)
        with engine_of(tiny_model("llama"), num_blocks=70, tiers=tiers) as engine:
            yield engine


class TestLocalEngineInSmallChunks(EngineConformance):
    long_tokens = 300

    @pytest.fixture(scope="class")
    def engine(self) -> Iterator[LocalEngine]:
        with engine_of(tiny_model("qwen3"), max_batch_tokens=7, max_running=3, block_size=4, num_blocks=400) as engine:
            yield engine
