"""An engine in its own process passes the suite that every engine must pass."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

pytest.register_assert_rewrite("kedge.engine.conformance")

from kedge.engine.conformance import EngineConformance  # noqa: E402
from kedge.engine.echo import EchoEngine  # noqa: E402
from kedge.engine.local.engine import LocalEngine  # noqa: E402
from kedge.engine.process.engine import ProcessEngine  # noqa: E402
from kedge.engine.process.local import LocalProcessEngine  # noqa: E402
from tests.engine.local.conftest import engine_of, tiny_model  # noqa: E402


class TestEchoEngineInAProcess(EngineConformance):
    timeout_s = 10.0

    @pytest.fixture(scope="class")
    def engine(self) -> Iterator[ProcessEngine]:
        with ProcessEngine(partial(EchoEngine, delay_s=2e-4)) as engine:
            yield engine


def tiny_engine() -> LocalEngine:
    return engine_of(tiny_model("llama"))


class TestLocalEngineInAProcess(EngineConformance):
    @pytest.fixture(scope="class")
    def engine(self) -> Iterator[LocalProcessEngine]:
        with LocalProcessEngine(tiny_engine) as engine:
            yield engine
