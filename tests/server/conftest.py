"""Real servers on free ports, around the echo engine, also one whose model says what a test has set."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anthropic
import httpx
import openai
import pytest
import uvicorn
import yaml
from fastapi import FastAPI

from kedge.engine.base import Engine
from kedge.engine.echo import ByteTokenizer, EchoEngine
from kedge.server.app import create_app
from kedge.server.service import Service
from kedge.server.tenancy import KeyRing
from kedge.settings import ServerSettings
from kedge.types import GenerateRequest

if TYPE_CHECKING:
    from kedge.server.tracing import OpenTelemetry

FLOW = """
name: pair
agents:
  - {id: first, system: You begin., user: "Q: {user_question}"}
  - {id: last, system: You end., user: "Q: {user_question} A: {agent_first_current}"}
"""
PAIR: dict[str, Any] = yaml.safe_load(FLOW)
YAML = {"Content-Type": "application/yaml"}
MODEL = "kedge-nano"
TEMPLATE = (
    "{% if tools %}<|turn|>tools\n{{ tools | tojson }}{% endif %}{% for m in messages %}<|turn|>{{ m.role }}\n"
    "{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}<|turn|>assistant:"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Åbo"}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"town": {"type": "string"}}}
WEATHER: Any = {"name": "weather", "description": "Tells the weather.", "parameters": PARAMETERS}
PATIENCE = 60.0
"""Seconds after which something hangs, even on a busy machine."""


@dataclass
class Served:
    """A server that runs, and how to reach it."""

    engine: Engine
    app: FastAPI
    server: uvicorn.Server
    thread: threading.Thread
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def service(self) -> Service:
        return self.app.state.service

    def client(self, key: str = "none", **options: object) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **options)

    def claude(self, key: str = "none") -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key=key, max_retries=0)

    def http(self, key: str = "none") -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE)

    def connect(self, sent: bytes = b"") -> socket.socket:
        opened = socket.create_connection(("127.0.0.1", self.port), PATIENCE)
        opened.sendall(sent)
        return opened

    def end(self) -> None:
        """Tell the server to end, as SIGTERM does."""
        self.server.handle_exit(15, None)

    def has_ended(self) -> bool:
        self.thread.join(PATIENCE)
        return not self.thread.is_alive()

    def wait_quiet(self) -> None:
        """Until nothing is in flight any more, and whatever follows from the last call's end has been done."""
        wait_until(lambda: not self.service.in_flight)


def wait_until(condition: Callable[[], bool], patience: float = PATIENCE) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def impatient(app: FastAPI, **options: Any) -> uvicorn.Server:
    """A server that ends at once, and only when it is told to."""
    return uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=1, **options))


@contextmanager
def serving(
    engine: Engine,
    config: ServerSettings | None = None,
    keys: KeyRing | None = None,
    tracing: OpenTelemetry | None = None,
    build: Callable[..., uvicorn.Server] = impatient,
) -> Iterator[Served]:
    app = create_app(engine, config, keys, tracing)
    server = build(app, port=0, log_level="warning")
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    running = Served(engine, app, server, thread, server.servers[0].sockets[0].getsockname()[1])
    try:
        yield running
    finally:
        app.state.service.is_ending = True
        running.end()
        assert running.has_ended()


class Templated(ByteTokenizer):
    """Bytes, with a chat template of Transformers around them."""

    def __init__(self, template: str = TEMPLATE) -> None:
        # Not before it is needed: tests on vLLM choose how Triton runs before anything imports that.
        from tests.engine.local.conftest import tiny_tokenizer

        self.inner = tiny_tokenizer().inner
        self.inner.chat_template = template


class Talking:
    """A server, and what its model says next."""

    def __init__(self, served: Served) -> None:
        self.served, self.text = served, ""

    def prompt(self) -> str:
        """The text of the last prompt."""
        return ByteTokenizer().decode(self.request().tokens)

    def request(self) -> GenerateRequest:
        """The last request that reached the engine."""
        return self.served.engine.requests[-1]


@contextmanager
def talking(
    keys: KeyRing | None = None, template: str = TEMPLATE, settings: ServerSettings | None = None
) -> Iterator[Talking]:
    engine = EchoEngine(lambda _: told.text)
    engine.tokenizer = Templated(template)
    with engine, serving(engine, settings or ServerSettings(tool_call_parser="hermes"), keys) as running:
        told = Talking(running)
        yield told


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One for all tests of a module: an echo, with workflows and tools."""
    with EchoEngine() as engine, serving(engine, ServerSettings(tools=True)) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return served.client()


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with served.http() as opened:
        yield opened


@pytest.fixture(scope="module")
def told() -> Iterator[Talking]:
    """One whose model says what a test has set."""
    with talking() as running:
        running.text = "Fine."
        yield running
