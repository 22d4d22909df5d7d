"""Every engine passes the suite that all must pass: the echo, the embedded one, and both in a process of their own."""

from collections.abc import Iterator, Mapping
from functools import partial

import pytest

from kedge.engine.echo import EchoEngine
from kedge.engine.local.engine import LocalEngine
from kedge.engine.process.engine import ProcessEngine
from kedge.settings import ThrottledTiers
from tests.engine.conformance import EngineConformance
from tests.engine.local.conftest import at_rest, engine_of, tiny_engine, tiny_model


class TestEchoEngine(EngineConformance):
    @pytest.fixture
    def engine(self) -> Iterator[EchoEngine]:
        with EchoEngine(delay_s=2e-4) as engine:
            yield engine

    def small_engine(self, engine: EchoEngine) -> EchoEngine:
        return type(engine)(delay_s=1e-4, capacity=self.small_capacity)

    def check_at_rest(self, engine: EchoEngine) -> None:
        engine.cache.check_integrity()
        assert engine.cache.stats().leased_blocks == 0
        assert not engine.in_flight


class TestLocalEngine(EngineConformance):
    """The suite with a small engine, and a look at what is left once nothing runs."""

    small_capacity = 16 * 16
    family = "llama"
    settings: Mapping[str, object] = {}

    @pytest.fixture(scope="class")
    def engine(self) -> Iterator[LocalEngine]:
        with engine_of(tiny_model(self.family), **self.settings) as engine:
            yield engine

    def small_engine(self, engine: LocalEngine) -> LocalEngine:
        config = engine.config.model_copy(update={"kv_memory": "16 blocks", "block_size": 16})
        return LocalEngine.from_runner(engine.runner, engine.tokenizer, config)

    def check_at_rest(self, engine: LocalEngine) -> None:
        at_rest(engine)


class TestLocalEngineWithAHostTier(TestLocalEngine):
    tiers = ThrottledTiers(host_memory="64 blocks", backup_hits=0, throttle=1e-4)
    settings = {"kv_memory": "70 blocks", "tiers": tiers}


class TestLocalEngineInSmallChunks(TestLocalEngine):
    long_tokens, family = 300, "qwen3"
    settings = {"max_batch_tokens": 7, "max_running": 3, "block_size": 4, "kv_memory": "400 blocks"}


def echo(capacity: int = 65536) -> ProcessEngine:
    return ProcessEngine(partial(EchoEngine, delay_s=2e-4, capacity=capacity))


class TestEchoEngineInAProcess(EngineConformance):
    @pytest.fixture(scope="class")
    def engine(self) -> Iterator[ProcessEngine]:
        with echo() as engine:
            yield engine

    def small_engine(self, engine: ProcessEngine) -> ProcessEngine:  # noqa: ARG002
        return echo(self.small_capacity)


@pytest.mark.slow
class TestLocalEngineInAProcess(EngineConformance):
    small_capacity = 16 * 16

    @pytest.fixture(scope="class")
    def engine(self) -> Iterator[ProcessEngine]:
        with ProcessEngine(tiny_engine) as engine:
            yield engine

    def small_engine(self, engine: ProcessEngine) -> ProcessEngine:  # noqa: ARG002
        return ProcessEngine(partial(tiny_engine, num_blocks=16))

    def check_at_rest(self, engine: ProcessEngine) -> None:
        engine.wait_idle(self.timeout_s)
        assert engine.inspect()["cache"]["leased_blocks"] == 0
