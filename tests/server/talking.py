"""A server whose model says what a test has set, with a chat template that shows tools and calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kedge.engine.echo import ByteTokenizer, EchoEngine
from kedge.server.tenancy import KeyRing
from kedge.settings import ServerSettings
from kedge.types import GenerateRequest
from tests.server.conftest import Served, serving
from tests.server.openai.test_tool_calls import Templated

MODEL = "kedge-nano"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Åbo"}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"town": {"type": "string"}}}


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
def talking(keys: KeyRing | None = None) -> Iterator[Talking]:
    engine = EchoEngine(lambda _: told.text)
    engine.tokenizer = Templated()
    with engine, serving(engine, ServerSettings(tool_call_parser="hermes"), keys) as running:
        told = Talking(running)
        yield told
