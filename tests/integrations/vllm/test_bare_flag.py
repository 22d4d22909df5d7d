"""vLLM's server with the one flag and the middleware, and nothing else of ours: what clients get is what stock vLLM
answers, and the page says what was found.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.coding_clients import CLAUDE_CODE, CODEX, claude_code, codex, events
from tests.integrations.vllm.test_plain_server import MIDDLEWARE, NAMES, clients, reported
from tests.integrations.vllm.test_server import MODEL, Server, serving

handoffs = pytest.importorskip("tests.handoffs")
pytestmark = pytest.mark.slow

FLAG = {"kv_connector": "KedgeConnector", "kv_role": "kv_both"}
TOOLS = (
    *("--enable-auto-tool-choice", "--tool-call-parser", "xlam"),
    *("--structured-outputs-config", json.dumps({"backend": "xgrammar", "disable_any_whitespace": True})),
)
"""Calls that must be made are written by vLLM's grammar of JSON. By its other parsers, such as `hermes`, or with white
space, the grammar allows blanks without end, and the bundled model writes them."""
ROOM = ("--num-gpu-blocks-override", "512", "--max-model-len", "4096")
CHECK = "You check an answer. Read it with care, compare it with the question, and say what is wrong. " * 4
ROLES = ("Solve it. ", "Check it. ", "Judge it. ")


@pytest.fixture(scope="module")
def stock() -> dict[str, list[str]]:
    """What clients get of vLLM as it is."""
    with serving(*TOOLS, *NAMES, *ROOM, transfer=None) as plain:
        return {**answers(plain), "handoffs": handoffs.answers(plain.url)}


@pytest.fixture(scope="module")
def server(stock: object) -> Iterator[Server]:  # noqa: ARG001 - one engine at a time: stock goes first
    with serving(*MIDDLEWARE, *TOOLS, *NAMES, *ROOM, transfer=FLAG) as built:
        yield built


def answers(server: Server) -> dict[str, list[str]]:
    """Greedy answers to three agents by every client, who asks questions of its own."""
    return {
        name: [ask(role + CHECK, question(first + number)) for number in range(5) for role in ROLES]
        for first, (name, ask) in zip((0, 5, 10, 15), clients(server).items(), strict=True)
    }


def question(number: int) -> str:
    return f"Tom has {number} apples and buys {number + 3} more. How many apples does Tom have then? " * 3


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


def test_nothing_is_changed_until_it_is_said_so(server: Server, stock: dict[str, list[str]]) -> None:
    before = asked(server)["known_agents"]
    for _ in range(2):
        assert answers(server) == {name: stock[name] for name in clients(server)}, "also from the cache"
    found = asked(server)
    assert found["mode"] == "observe" and found["translated_tokens"] == 0 and found["failures"] == 0
    assert found["known_agents"] >= before + 100, "agents are known from their third prompt on, by whatever protocol"
    assert len(found["agents"]) >= 3 and found["shared_tokens"] > 500, "what could have been saved is counted"


def test_an_unchanged_team_hands_over_and_its_agents_are_linked(server: Server, stock: dict[str, list[str]]) -> None:
    before = {one["id"] for one in asked(server)["agents"]}
    assert handoffs.answers(server.url) == stock["handoffs"]
    found = asked(server)
    handoffs.assert_linked(found, [one for one in found["agents"] if one["id"] not in before])
    for by_chat, is_streamed in ((False, True), (True, False), (True, True)):
        again = handoffs.answers(server.url, by_chat=by_chat, is_streamed=is_streamed)
        assert again == stock["handoffs"], "whatever it speaks"
