"""A real server around the echo engine, and the hints that it has received."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from kedge.engine.echo import EchoEngine
from kedge.hints import Hints
from kedge.settings import ServerSettings
from tests.server.conftest import Served, serving

os.environ["LANGSMITH_TRACING"] = "false"
os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "true"


@dataclass
class ReceivedHints:
    """All hints that a server has read, in order; those without an agent came without a prompt."""

    served: Served
    all: list[Hints] = field(default_factory=list)

    @property
    def calls(self) -> list[Hints]:
        return [hints for hints in self.all if hints.agent]

    @property
    def aside(self) -> list[Hints]:
        return [hints for hints in self.all if not hints.agent]

    @property
    def agents(self) -> list[str]:
        return [hints.agent for hints in self.calls]

    @property
    def url(self) -> str:
        return f"{self.served.url}/v1"

    @property
    def model(self) -> str:
        return self.served.service.model_name


@contextmanager
def recording(engine: EchoEngine, config: ServerSettings, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReceivedHints]:
    """Run a server that records the hints that it receives."""
    with engine, serving(engine, config) as served:
        found, read = ReceivedHints(served), served.service.hints

        def read_and_record(*given: Any) -> Hints:
            hints = read(*given)
            found.all.append(hints)
            return hints

        monkeypatch.setattr(served.service, "hints", read_and_record)
        yield found


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReceivedHints]:
    """A server for each test: hints without a prompt may arrive after the test that sent them."""
    with recording(EchoEngine(), ServerSettings(), monkeypatch) as found:
        yield found
