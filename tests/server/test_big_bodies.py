"""Large bodies: wrong ones end at their first wrong item, right ones are read off the event loop, and what is far too
long is refused before it is tokenized.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kedge.engine.echo import ByteTokenizer, EchoEngine
from kedge.errors import PromptTooLong
from kedge.server.anthropic import MessagesBody
from kedge.server.openai.protocol import ChatBody, CompletionBody
from kedge.server.responses import ResponsesBody
from kedge.server.workflows.routes import RunBody
from kedge.settings import ServerSettings
from tests.server.conftest import FLOW, YAML, Served, serving
from tests.tokenizers_of_families import FAMILIES, tokenizer_of

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
ASK = {"role": "user", "content": "hi"}
MANY = 50_000
WRONG: list[tuple[Any, str, dict[str, Any]]] = [
    (ChatBody, CHAT, {"messages": [1] * MANY}),
    (ChatBody, CHAT, {"messages": [{"role": "user", "content": [1] * MANY}]}),
    (ChatBody, CHAT, {"messages": [{"role": "assistant", "tool_calls": [1] * MANY}]}),
    (ChatBody, CHAT, {"messages": [ASK], "tools": [1] * MANY}),
    (ChatBody, CHAT, {"messages": [ASK], "stop": [1] * MANY}),
    (ChatBody, CHAT, {"messages": [ASK], "documents": [1] * MANY}),
    (CompletionBody, TEXT, {"prompt": [None] * MANY}),
    (CompletionBody, TEXT, {"prompt": [[None] * MANY]}),
    (MessagesBody, MESSAGES, {"messages": [1] * MANY}),
    (MessagesBody, MESSAGES, {"messages": [ASK], "system": [1] * MANY}),
    (MessagesBody, MESSAGES, {"messages": [ASK], "tools": [{}] * MANY}),
    (MessagesBody, MESSAGES, {"messages": [ASK], "stop_sequences": [1] * MANY}),
    (ResponsesBody, RESPONSES, {"input": [1] * MANY}),
    (ResponsesBody, RESPONSES, {"input": "x", "tools": [1] * MANY}),
    (RunBody, "/v1/workflows/pair/runs", {"inputs": {str(at): at for at in range(MANY)}}),
    (RunBody, "/v1/workflows/pair/runs", {"inputs": {}, "reuse": {str(at): at for at in range(MANY)}}),
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with EchoEngine() as engine, serving(engine, ServerSettings()) as running, running.http() as http:
        http.post("/v1/workflows", content=FLOW, headers=YAML).raise_for_status()
        yield running


@pytest.mark.parametrize(("model", "path", "body"), WRONG)
def test_a_wrong_list_ends_at_its_first_wrong_item(served: Served, model: Any, path: str, body: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error") as caught:
        model.model_validate(body)
    assert len(caught.value.errors()) <= 8  # one for each member of a union
    with served.http() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 400 and len(answer.text) < 1500, answer.text


@pytest.mark.parametrize("size", [10, 200_000])
def test_a_long_body_is_read_in_another_thread(served: Served, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()

    def loads(*given: Any, **more: Any) -> Any:
        threads.add(threading.current_thread().name)
        return kept(*given, **more)

    kept = json.loads
    monkeypatch.setattr("json.loads", loads)
    with served.http() as http:
        content = json.dumps({"messages": [{**ASK, "content": "x" * size}], "max_tokens": 1}).encode()
        answer = http.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == (200 if size == 10 else 400)
    assert any(name.startswith("kedge-work") for name in threads) == (size > 10)


@pytest.mark.parametrize("content", ["{", "[" * 100_000, '{"messages": NaN' + " " * 70_000, "null" + " " * 70_000])
def test_a_long_body_that_is_no_json_is_refused_like_a_short_one(served: Served, content: str) -> None:
    with served.http() as http:
        answer = http.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400


# length ---------------------------------------------------------------------------------------------------------------

LONG = "a " * 200_000


class OnlyShort:
    """Takes part in tokenizing, and fails for long texts."""

    @staticmethod
    def split(text: str) -> list[str]:
        assert len(text) < 1000
        return [text]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"prompt": LONG}, "prompt"),
        (TEXT, {"prompt": ["a", LONG]}, "prompt"),
        (CHAT, {"messages": [{**ASK, "content": LONG}]}, "messages"),
        (CHAT, {"messages": [ASK] * 100_000}, "messages"),
        (MESSAGES, {"messages": [{**ASK, "content": LONG}], "max_tokens": 5}, "messages"),
        (MESSAGES, {"messages": [ASK], "system": LONG, "max_tokens": 5}, "messages"),
        (RESPONSES, {"input": LONG}, "input"),
        (CHAT, {"messages": [], "kedge": {"workflow": "pair", "agent": "first", "bindings": {"user_question": LONG}}},
         "kedge.bindings"),
        ("/v1/workflows/pair/runs", {"inputs": {"user_question": LONG}}, "inputs.user_question"),
    ],
)  # fmt: skip
def test_what_is_far_too_long_is_not_tokenized(
    served: Served, path: str, body: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByteTokenizer, "_special", OnlyShort)
    with served.http() as http:
        answer = http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    if path != MESSAGES:
        assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("family", FAMILIES)
def test_only_a_part_of_a_long_text_is_tokenized(family: str) -> None:
    tokenizer = tokenizer_of(family)
    tokenizer.most = 100
    for text in (LONG, "x" * 100_000, "é∆" * 50_000, "<s>" * 50_000):
        with pytest.raises(PromptTooLong) as caught:
            tokenizer.measure(text)
        whole = len(tokenizer.inner.encode(text, add_special_tokens=False))
        assert caught.value.most == 100 and 0.5 * whole < caught.value.tokens < 2 * whole
    for text in ("Hello there " * 20, " " * 150, "rains and rains"):
        tokenizer.measure(text)


def test_health_is_answered_beside_a_long_body(served: Served) -> None:
    async def both() -> list[int]:
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
            long = http.post(CHAT, json={"messages": [{**ASK, "content": [{"type": "text", "text": "x"}] * MANY}]})
            return [one.status_code for one in await asyncio.gather(long, *(http.get("/health") for _ in range(20)))]

    assert asyncio.run(both()) == [400, *[200] * 20]
