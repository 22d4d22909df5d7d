"""Structured output and the page of plain traffic on `kedge serve --engine vllm`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kedge.integrations.vllm.engine.engine import VLLMEngine  # noqa: E402
from kedge.settings import EngineSettings, ServerSettings  # noqa: E402
from tests.integrations.vllm.test_serve import OWN, PATIENCE  # noqa: E402
from tests.server.conftest import Served, serving  # noqa: E402
from tests.server.talking import TEMPLATE  # noqa: E402
from tests.server.test_structured_output import ASK, MODEL, NAMES, TOOLS, Order, Part  # noqa: E402


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    with VLLMEngine(config=EngineSettings(backend="vllm", vllm=OWN)) as engine:
        engine.tokenizer.inner.chat_template = TEMPLATE
        with serving(engine, ServerSettings(tool_call_parser="hermes")) as served:
            yield served


@pytest.fixture(scope="module")
def client(running: Served) -> openai.OpenAI:
    return running.client(timeout=PATIENCE)


def shaped(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def test_answers_conform_also_many_at_once_and_beside_free_ones(client: openai.OpenAI) -> None:
    def ask(number: int) -> str:
        more: Any = {"response_format": shaped((Part, Order)[number % 2].model_json_schema())} if number % 3 else {}
        asked: Any = {"model": MODEL, "messages": ASK, "temperature": 0.9, "seed": number, "max_tokens": 200}
        return client.chat.completions.create(**asked, **more).choices[0].message.content or ""

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(ask, range(16)))
    for number, answer in enumerate(answers):
        if number % 3:
            (Part, Order)[number % 2].model_validate_json(answer)


def test_a_forced_call_is_one(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": ASK, "tools": TOOLS, "tool_choice": "required", "max_tokens": 300}
    for call in client.chat.completions.create(**asked).choices[0].message.tool_calls or pytest.fail("no call"):
        assert call.function.name in NAMES  # type: ignore[union-attr]
        json.loads(call.function.arguments)  # type: ignore[union-attr]


def test_a_schema_that_cannot_be_followed_is_refused_and_the_server_goes_on(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": ASK, "max_tokens": 20}
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(**asked, response_format=shaped({"type": "string", "pattern": "(?=x)"}))
    assert client.chat.completions.create(**asked).choices


def test_the_page_of_plain_traffic_is_shown(running: Served, client: openai.OpenAI) -> None:
    for number in range(4):
        said = f"Question {number * 7919}. " + "What is the sum of all of these small numbers, and why is that so? " * 2
        messages: Any = [
            {"role": "system", "content": "You are a careful solver. " * 8},
            {"role": "user", "content": said},
        ]
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
    deadline = time.monotonic() + PATIENCE
    with running.http() as http:
        while not (report := http.get("/kedge/report").json()) or report["requests"] < 4:
            assert time.monotonic() < deadline, report
            client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=1)
            time.sleep(1)
        assert report["mode"] == "observe" and report["namespaces"] == ["default"]
