"""The shipped fake passes the suite that every engine must pass."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("tests.engine.conformance")

from kedge.engine.echo import EchoEngine  # noqa: E402
from tests.engine.conformance import EngineConformance  # noqa: E402


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
