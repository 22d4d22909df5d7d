"""Clients that cannot be changed, on vLLM's own server: with the one flag and the middleware they get what stock vLLM
answers, and the page says what was found; where it is set so, a team is translated.
"""

import json
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest

from kedge.workflow.template import parse
from kedge.workloads.miniature import MATH, questions
from tests.coding_clients import CLAUDE_CODE, CODEX, claude_code, codex, events
from tests.integrations.vllm.test_server import MODEL, Server, serving

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
agents = pytest.importorskip("agents", reason="the OpenAI Agents SDK is not installed")
handoffs = pytest.importorskip("tests.handoffs")

TRANSLATING: dict[str, Any] = {
    "discovery": {"mode": "translate"},
    "planner": {"by_cost": False},
    "guard": {"fidelity": "any"},
}
NAMES = ("--served-model-name", MODEL, agents.models.get_default_model())
"""The last one is what the Agents SDK asks for where an application names no model"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*NAMES, "--num-gpu-blocks-override", "512", extra=TRANSLATING) as built:
        yield built


def clients(server: Server) -> dict[str, Callable[..., str]]:
    """Return how each client asks for a few tokens, by its protocol."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    other = anthropic.Anthropic(base_url=server.url, api_key="none")
    greedy: Any = {"model": MODEL, "temperature": 0}

    def chat(system: str, user: str, count: int = 8) -> str:
        said = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return client.chat.completions.create(**greedy, messages=said, max_tokens=count).choices[0].message.content

    def completions(system: str, user: str, count: int = 8) -> str:
        return client.completions.create(**greedy, prompt=f"{system}\n{user}", max_tokens=count).choices[0].text

    def responses(system: str, user: str, count: int = 8) -> str:
        done = client.responses.create(**greedy, instructions=system, input=user, max_output_tokens=count)
        return str(done.output_text)

    def messages(system: str, user: str, count: int = 8) -> str:
        said: Any = [{"role": "user", "content": user}]
        body = {"temperature": 0}
        done = other.messages.create(model=MODEL, system=system, messages=said, max_tokens=count, extra_body=body)
        return "".join(block.text for block in done.content if block.type == "text")

    return {"chat": chat, "completions": completions, "responses": responses, "messages": messages}


def reported(server: Server, expected: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """What the page shows, once it shows what is expected: it is made once a second at most."""
    ask, found = clients(server)["responses"], dict[str, Any]()
    for _ in range(60):
        found = json.loads(server.get("/kedge/report"))
        if found and expected(found):
            return found
        time.sleep(1)
        ask("You answer.", "Hello", 4)
    raise AssertionError(f"the page still shows {found}")


def team(ask: Any, number: int) -> bool:
    """Let the math team answer a question, as anyone's application would; returns whether the answer is right."""
    question = next(islice(questions(0), number, None))
    values, text = {"user_question": question.text}, ""
    for agent in MATH.workflow().agents:
        system, user = (
            "".join(part if isinstance(part, str) else values[part.name] for part in parse(one))
            for one in (agent.system, agent.user)
        )
        text = ask(system, user, agent.max_tokens)
        values[f"agent_{agent.id}_current"] = text
        if agent.tool:
            values[f"condition_{agent.id}_current"] = agent.tool(text, values)
    return MATH.final(text) == question.answer


@pytest.fixture(scope="module")
def known_team(server: Server) -> dict[str, Any]:
    """The page, once the team has been found in what OpenAI's client has asked."""
    assert all(team(clients(server)["chat"], number) for number in range(12))
    return reported(server, lambda page: page["requests"] >= 60 and len(page["agents"]) == 5)


def test_a_team_of_openais_client_is_translated(server: Server, known_team: dict[str, Any]) -> None:
    assert known_team["mode"] == "translate" and known_team["failures"] == 0
    line = next(
        one for one in server.get("/metrics").splitlines() if one.startswith("vllm:kedge_translated_tokens_total")
    )
    assert float(line.split()[-1]) > 0


def test_what_is_said_of_sessions_between_requests_is_answered_by_the_scheduler(server: Server) -> None:
    def advised(**kedge: Any) -> dict[tuple[str, str], str]:
        actions = server.post("/v1/hints", {"kedge": kedge})["actions"]
        return {(one["action_id"], one.get("session", "")): one["outcome"] for one in actions}

    said: dict[str, Any] = {"session": "mine", "keep_for": 7200, "expects": {"nobody": 3}, "mood": 1}
    answers = {("keep_for", ""): "deferred", ("expects", "nobody"): "rejected", ("mood", ""): "rejected"}
    assert advised(**said) == answers, "the engine is idle, and takes a step for it"
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    headers = {"x-session-id": "mine"}
    client.completions.create(model=MODEL, prompt="Hello", max_tokens=2, extra_headers=headers)
    assert advised(**said) == {**answers, ("keep_for", ""): "clipped"}
    assert advised(expects={"mine": None}) == {("expects", "mine"): "applied"}
    assert advised(run="r", steps={"a": 1}, seq=3) == {("steps", ""): "applied"}
    assert advised(run="r", steps={"a": 1}, seq=3) == {("steps", ""): "rejected"}
    assert advised(run="r", final=True) == {("final", ""): "applied"}
    assert advised(session="mine", final=True) == {("final", ""): "applied"}
    assert advised(expects={"mine": 1}) == {("expects", "mine"): "rejected"}


@pytest.mark.usefixtures("known_team")
def test_the_same_agents_are_known_whatever_protocol_they_speak(server: Server) -> None:
    known = reported(server, lambda _: True)["known_agents"]
    assert all(team(clients(server)["messages"], number) for number in range(20, 23))
    assert reported(server, lambda page: page["known_agents"] >= known + 15)["failures"] == 0


# the bare flag --------------------------------------------------------------------------------------------------------

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
    with serving(*TOOLS, *NAMES, *ROOM, extra=None) as plain:
        return {**answers(plain), "handoffs": handoffs.answers(plain.url)}


@pytest.fixture(scope="module")
def bare(stock: object) -> Iterator[Server]:  # noqa: ARG001 - one engine at a time: stock goes first
    with serving(*TOOLS, *NAMES, *ROOM, extra={}) as built:
        yield built


def answers(bare: Server) -> dict[str, list[str]]:
    """Greedy answers to three agents by every client, who asks questions of its own."""
    return {
        name: [ask(role + CHECK, question(first + number)) for number in range(5) for role in ROLES]
        for first, (name, ask) in zip((0, 5, 10, 15), clients(bare).items(), strict=True)
    }


def question(number: int) -> str:
    return f"Tom has {number} apples and buys {number + 3} more. How many apples does Tom have then? " * 3


def asked(bare: Server) -> dict[str, Any]:
    """What was found, once the engine has reported a request more."""
    before = json.loads(bare.get("/kedge/report")) or {"requests": 0}
    return reported(bare, lambda page: page["requests"] > before["requests"])


@pytest.mark.slow
def test_claude_code_is_served_as_it_asks(bare: Server) -> None:
    for _ in range(2):
        seen = events(f"{bare.url}/v1/messages?beta=true", claude_code(MODEL, 16, thinks=False), CLAUDE_CODE)
        kinds = [one["type"] for one in seen if one["type"] != "ping"]
        assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    found = asked(bare)
    assert found["mode"] == "observe" and found["failures"] == 0 and found["translated_tokens"] == 0


@pytest.mark.slow
def test_codex_is_served_as_it_asks(bare: Server) -> None:
    body = {**codex(MODEL, encrypted=None), "max_output_tokens": 16}
    kinds = [one["type"] for one in events(f"{bare.url}/v1/responses", body, CODEX)]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    assert asked(bare)["failures"] == 0


@pytest.mark.slow
def test_nothing_is_changed_until_it_is_said_so(bare: Server, stock: dict[str, list[str]]) -> None:
    before = asked(bare)["known_agents"]
    for _ in range(2):
        assert answers(bare) == {name: stock[name] for name in clients(bare)}, "also from the cache"
    found = asked(bare)
    assert found["mode"] == "observe" and found["translated_tokens"] == 0 and found["failures"] == 0
    assert found["known_agents"] >= before + 100, "agents are known from their third prompt on, by whatever protocol"
    assert len(found["agents"]) >= 3 and found["shared_tokens"] > 500, "what could have been saved is counted"


@pytest.mark.slow
def test_an_unchanged_team_hands_over_and_its_agents_are_linked(bare: Server, stock: dict[str, list[str]]) -> None:
    before = {one["id"] for one in asked(bare)["agents"]}
    assert handoffs.answers(bare.url) == stock["handoffs"]
    found = asked(bare)
    handoffs.assert_linked(found, [one for one in found["agents"] if one["id"] not in before])
    for by_chat, is_streamed in ((False, True), (True, False), (True, True)):
        again = handoffs.answers(bare.url, by_chat=by_chat, is_streamed=is_streamed)
        assert again == stock["handoffs"], "whatever it speaks"
