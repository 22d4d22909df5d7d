"""Clients that cannot be changed, on vLLM's own server by its flag: a team is found, translated and shown."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest

from kedge.workflow.template import parse
from kedge.workloads.miniature import MATH, questions
from tests.integrations.vllm.test_server import MODEL, Server, serving

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
agents = pytest.importorskip("agents", reason="the OpenAI Agents SDK is not installed")

TRANSFER = {
    "kv_connector": "KedgeConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "discovery": {"mode": "translate"},
        "planner": {"by_cost": False},
        "guard": {"fidelity": "any"},
    },
}
MIDDLEWARE = ("--middleware", "kedge.integrations.vllm.middleware.KedgeMiddleware")
NAMES = ("--served-model-name", MODEL, agents.models.get_default_model())
"""The last one is what the Agents SDK asks for where an application names no model"""
SCHEDULER = ("--scheduler-cls", "kedge.integrations.vllm.plugin.scheduler.make_scheduler")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*MIDDLEWARE, *SCHEDULER, *NAMES, "--num-gpu-blocks-override", "512", transfer=TRANSFER) as built:
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
    """What the page shows, once it shows what is expected: the engine reports at most once a second, in its steps."""
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


@pytest.mark.usefixtures("known_team")
def test_agents_of_the_agents_sdk_are_found_by_its_default_model_and_protocol(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    agents.set_tracing_disabled(True)
    known = reported(server, lambda _: True)["known_agents"]

    def ask(system: str, user: str, count: int) -> str:
        settings = agents.ModelSettings(temperature=0, max_tokens=count)
        agent = agents.Agent("member", instructions=system, model_settings=settings)
        return str(agents.Runner.run_sync(agent, user).final_output)

    assert agents.Agent("any").model is None, "the SDK's default"
    assert all(team(ask, number) for number in range(30, 35))
    found = reported(server, lambda page: page["known_agents"] >= known + 10)
    assert len(found["agents"]) == 5 and found["failures"] == 0
