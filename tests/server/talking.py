"""A server whose model says what a test has set, with a chat template that shows tools and calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic

from kedge.engine.echo import ByteTokenizer, EchoEngine
from kedge.server.tenancy import KeyRing
from kedge.settings import ServerSettings
from kedge.types import GenerateRequest
from tests.engine.local.conftest import tiny_tokenizer
from tests.server.conftest import Served, serving

MODEL = "kedge-nano"
TEMPLATE = (
    "{% if tools %}<|turn|>tools\n{{ tools | tojson }}{% endif %}{% for m in messages %}<|turn|>{{ m.role }}\n"
    "{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}<|turn|>assistant:"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Åbo"}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"town": {"type": "string"}}}
WEATHER: Any = {"name": "weather", "description": "Tells the weather.", "parameters": PARAMETERS}


class Templated(ByteTokenizer):
    """Bytes, with a chat template of Transformers around them."""

    def __init__(self, template: str = TEMPLATE) -> None:
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

    def claude(self, key: str = "none") -> anthropic.Anthropic:
        """Anthropic's client of it."""
        return anthropic.Anthropic(base_url=self.served.url, api_key=key, max_retries=0)


@contextmanager
def talking(
    keys: KeyRing | None = None, template: str = TEMPLATE, settings: ServerSettings | None = None
) -> Iterator[Talking]:
    engine = EchoEngine(lambda _: told.text)
    engine.tokenizer = Templated(template)
    with engine, serving(engine, settings or ServerSettings(tool_call_parser="hermes"), keys) as running:
        told = Talking(running)
        yield told
