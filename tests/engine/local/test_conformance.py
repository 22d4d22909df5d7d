"""The embedded engine passes the suite that every engine must pass, whole prompts at once and in small chunks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("tests.engine.conformance")

from kedge.engine.local.build import EngineParts  # noqa: E402
from kedge.engine.local.engine import LocalEngine  # noqa: E402
from kedge.settings import ThrottledTiers  # noqa: E402
from tests.engine.conformance import EngineConformance  # noqa: E402
from tests.engine.local.conftest import engine_of, tiny_model  # noqa: E402


class LocalConformance(EngineConformance):
    """The suite with a small engine, and a look at what is left once nothing runs."""

    small_capacity = 16 * 16

    def small_engine(self, engine: LocalEngine) -> LocalEngine:
        config = engine.config.model_copy(update={"kv_memory": "16 blocks", "block_size": 16})
        return LocalEngine.from_runner(engine.runner, engine.tokenizer, config)

    def check_at_rest(self, engine: LocalEngine) -> None:
        engine.wait_idle(self.timeout_s)
        engine.query(EngineParts.check_integrity)
        assert engine.inspect()["cache"]["leased_blocks"] == 0


class TestLocalEngine(LocalConformance):
    @pytest.fixture(scope="class")
    def engine(self) -> Iterator[LocalEngine]:
        with engine_of(tiny_model("llama")) as engine:
            yield engine


class TestLocalEngineWithAHostTier(LocalConformance):
    @pytest.fixture(scope="class")
    def engine(self) -> Iterator[LocalEngine]:
        tiers = ThrottledTiers(host_memory="64 blocks", backup_hits=0, throttle=1e-4)
        with engine_of(tiny_model("llama"), kv_memory="70 blocks", tiers=tiers) as engine:
            yield engine


class TestLocalEngineInSmallChunks(LocalConformance):
    long_tokens = 300

    @pytest.fixture(scope="class")
    def engine(self) -> Iterator[LocalEngine]:
        small = {"max_batch_tokens": 7, "max_running": 3, "block_size": 4, "kv_memory": "400 blocks"}
        with engine_of(tiny_model("qwen3"), **small) as engine:
            yield engine
