"""vLLM's server with the one flag and the middleware, and nothing else of ours: the page says what was found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.coding_clients import CLAUDE_CODE, CODEX, claude_code, codex, events
from tests.integrations.vllm.test_plain_server import MIDDLEWARE, NAMES, reported
from tests.integrations.vllm.test_server import MODEL, Server, serving

pytest.importorskip("vllm", reason="vLLM is not installed")
openai = pytest.importorskip("openai")
pytestmark = pytest.mark.slow

FLAG = {"kv_connector": "KedgeConnector", "kv_role": "kv_both"}
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
ROOM = ("--num-gpu-blocks-override", "512", "--max-model-len", "4096")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*MIDDLEWARE, *TOOLS, *NAMES, *ROOM, transfer=FLAG) as built:
        yield built


def asked(server: Server) -> dict[str, Any]:
    """What was found, once the engine has reported a request more."""
    before = json.loads(server.get("/kedge/report")) or {"requests": 0}
    return reported(server, lambda page: page["requests"] > before["requests"])


def test_claude_code_is_served_as_it_asks(server: Server) -> None:
    for _ in range(2):
        seen = events(f"{server.url}/v1/messages?beta=true", claude_code(MODEL, 16, thinks=False), CLAUDE_CODE)
        kinds = [one["type"] for one in seen if one["type"] != "ping"]
        assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    found = asked(server)
    assert found["mode"] == "observe" and found["failures"] == 0 and found["translated_tokens"] == 0


def test_codex_is_served_as_it_asks(server: Server) -> None:
    body = {**codex(MODEL, encrypted=None), "max_output_tokens": 16}
    kinds = [one["type"] for one in events(f"{server.url}/v1/responses", body, CODEX)]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    assert asked(server)["failures"] == 0


def test_nothing_is_changed_until_it_is_said_so(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    system = "You check an answer. Read it with care, compare it with the question, and say what is wrong. " * 4
    for number in range(12):
        question = f"Tom has {number} apples and buys {number + 3} more. How many apples does Tom have then? " * 3
        for role in ("Solve it. ", "Check it. ", "Judge it. "):
            messages = [{"role": "system", "content": role + system}, {"role": "user", "content": question}]
            client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, temperature=0)
    found = asked(server)
    assert found["mode"] == "observe" and found["translated_tokens"] == 0 and found["failures"] == 0
    assert len(found["agents"]) >= 3 and found["shared_tokens"] > 500, "what could have been saved is counted"
    page = server.get("/kedge")
    assert "Kedge: plain traffic" in page and "read or answered before elsewhere" in page
