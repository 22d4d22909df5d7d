"""An engine in its own process passes the suite that every engine must pass."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

pytest.register_assert_rewrite("tests.engine.conformance")

from kedge.engine.echo import EchoEngine  # noqa: E402
from kedge.engine.local.engine import LocalEngine  # noqa: E402
from kedge.engine.process.engine import ProcessEngine  # noqa: E402
from tests.engine.conformance import EngineConformance  # noqa: E402
from tests.engine.local.conftest import engine_of, tiny_model  # noqa: E402


def echo(capacity: int | None = None) -> ProcessEngine:
    options = {} if capacity is None else {"capacity": capacity}
    return ProcessEngine(partial(EchoEngine, delay_s=2e-4, **options))


class TestEchoEngineInAProcess(EngineConformance):
    @pytest.fixture(scope="class")
    def engine(self) -> Iterator[ProcessEngine]:
        with echo() as engine:
            yield engine

    def small_engine(self, engine: ProcessEngine) -> ProcessEngine:  # noqa: ARG002
        return echo(self.small_capacity)


def tiny_engine(num_blocks: int = 256) -> LocalEngine:
    return engine_of(tiny_model("llama"), kv_memory=f"{num_blocks} blocks", block_size=16)


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
