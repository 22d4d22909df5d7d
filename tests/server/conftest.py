"""Real servers on free ports, around the echo engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
import uvicorn
import yaml
from fastapi import FastAPI

from kedge.engine.base import Engine
from kedge.engine.echo import EchoEngine
from kedge.server.app import create_app
from kedge.server.service import Service
from kedge.server.tenancy import KeyRing
from kedge.server.tracing import OpenTelemetry
from kedge.server.workflows.server_runs import Workflows
from kedge.settings import ServerSettings

if TYPE_CHECKING:
    from tests.server.talking import Talking

FLOW = """
name: pair
agents:
  - {id: first, system: You begin., user: "Q: {user_question}"}
  - {id: last, system: You end., user: "Q: {user_question} A: {agent_first_current}"}
"""
PAIR: dict[str, Any] = yaml.safe_load(FLOW)
YAML = {"Content-Type": "application/yaml"}
PATIENCE = 60.0
"""Seconds after which something hangs, even on a busy machine."""


@dataclass
class Served:
    """A server that runs, and how to reach it."""

    engine: Engine
    app: FastAPI
    url: str

    @property
    def service(self) -> Service:
        return self.app.state.service

    @property
    def workflows(self) -> Workflows:
        return self.app.state.workflows

    def client(self, key: str = "none", **options: object) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **options)

    def http(self, key: str = "none") -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE)

    def wait_quiet(self) -> None:
        """Until nothing is in flight any more, and whatever follows from the last call's end has been done."""
        wait_until(lambda: self.service.is_quiet)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


@contextmanager
def serving(
    engine: Engine,
    config: ServerSettings | None = None,
    keys: KeyRing | None = None,
    tracing: OpenTelemetry | None = None,
) -> Iterator[Served]:
    app = create_app(engine, config, keys, tracing)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Served(engine, app, f"http://127.0.0.1:{port}")
    finally:
        app.state.service.is_ending = True
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One for all tests of a module: an echo, with workflows and tools."""
    with EchoEngine() as engine, serving(engine, ServerSettings(tools=True)) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return served.client()


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with served.http() as opened:
        yield opened


@pytest.fixture(scope="module")
def told() -> Iterator[Talking]:
    """One whose model says what a test has set."""
    from tests.server.talking import talking

    with talking() as running:
        running.text = "Fine."
        yield running
