"""A real server around the echo engine, and what it was told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from kedge.engine.echo import EchoEngine
from kedge.server.hints import Hints
from kedge.settings import ServerSettings
from tests.server.conftest import Served, serving

os.environ["LANGSMITH_TRACING"] = "false"
os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "true"


@dataclass
class Told:
    """All hints that a server understood, in order; those without an agent came without a prompt."""

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
def telling(engine: EchoEngine, config: ServerSettings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    """A server that notes what it is told."""
    with engine, serving(engine, config) as served:
        found, read = Told(served), served.service.hints

        def hints(*given: Any) -> Hints:
            understood = read(*given)
            found.all.append(understood)
            return understood

        monkeypatch.setattr(served.service, "hints", hints)
        yield found


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    """A server for each test: what one tells aside may come when it has ended."""
    with telling(EchoEngine(), ServerSettings(), monkeypatch) as found:
        yield found
