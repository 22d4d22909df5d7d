"""The OpenAI Agents SDK as it is, against a real server whose engine follows a script: the server reads handoffs.

The bundled model writes tool calls only where a grammar makes it, as in the last test, and a handoff is one.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import agents
import httpx
import pytest
from agents import Agent, RunConfig, Runner, function_tool, handoff
from agents.result import RunResultBase
from agents.run import CallModelData, ModelInputData
from openai import AsyncOpenAI

from kedge import LocalEngine
from kedge.engine.echo import EchoEngine
from kedge.integrations.openai_agents import step_graph, workflow
from kedge.settings import EngineSettings, ServerSettings
from kedge.workflow.step_graph import Node
from tests.handoffs import QUESTIONS, answers, assert_linked
from tests.integrations.conftest import ReceivedHints, recording
from tests.server.conftest import TEMPLATE, Served, Templated, serving

INFINITE = float("inf")


Decide = Callable[..., ReceivedHints]


@pytest.fixture
def decide(monkeypatch: pytest.MonkeyPatch) -> Iterator[Decide]:
    """A function that lets a team answer, whose model says what a script does, and returns what the server received."""
    with ExitStack() as stack:

        def decided(first: Agent[Any], *script: str, is_streamed: bool = False, end: str = "") -> ReceivedHints:
            says = iter(script)
            engine = EchoEngine(lambda _: next(says))
            engine.tokenizer = Templated()
            hermes = ServerSettings(tool_call_parser="hermes")
            received = stack.enter_context(recording(engine, hermes, monkeypatch))
            result = asyncio.run(answer(AsyncOpenAI(base_url=received.url, api_key="none"), first, is_streamed))
            assert (result.final_output, result.last_agent.name) == (script[-1], end or first.name)
            read = [bytes(token for token in one.tokens if token < 256).decode() for one in engine.requests]
            assert "rain in Bergen" in read[-1] or "look_up" not in script[-2], "a tool's result is read"
            return received

        yield decided


async def answer(client: AsyncOpenAI, first: Agent[Any], is_streamed: bool) -> RunResultBase:
    async with workflow(client, first) as run:
        if not is_streamed:
            return await Runner.run(first, "How is the weather?", run_config=run.config())
        streamed = Runner.run_streamed(first, "How is the weather?", run_config=run.config())
        async for _ in streamed.stream_events():
            pass
        return streamed


def call_of(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@function_tool
def look_up(town: str) -> str:
    return f"rain in {town}"


@pytest.fixture
def client(received: ReceivedHints) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=received.url, api_key="none", max_retries=0)


def agent(name: str, **options: Any) -> Agent[Any]:
    return Agent(name, instructions=f"You are {name}.", model="kedge-nano", **options)


# hints ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [False, True])
def test_handoffs_are_steps(is_streamed: bool, decide: Decide) -> None:
    clerk = agent("clerk", tools=[look_up])
    triage = agent("triage", handoffs=[agent("billing", handoffs=[clerk]), handoff(agent("support"))])
    looks = f"Let me see. {call_of('look_up', town='Bergen')}"
    script = call_of("transfer_to_billing"), call_of("transfer_to_clerk"), looks, "Take an umbrella."
    received = decide(triage, *script, is_streamed=is_streamed, end="clerk")
    first, second, third, _, end = received.all
    assert (first.workflow, first.agent) == ("triage", "triage")
    assert first.steps == {"triage": 0, "billing": 1, "support": 1, "clerk": 2}
    left = {"triage": INFINITE, "billing": 0, "support": INFINITE, "clerk": 1}
    assert (second.agent, second.steps, third.agent) == ("billing", left, "clerk")
    assert {hints.run for hints in received.all} == {first.run} and end.final


def test_agents_as_tools_report_back(decide: Decide) -> None:
    boss = agent("boss", tools=[agent("helper").as_tool("ask_helper", "Asks."), look_up])
    received = decide(boss, call_of("ask_helper", input="?"), "done", call_of("look_up", town="Bergen"), "all done")
    assert received.agents == ["boss", "helper", "boss", "boss"]
    assert [hints.steps for hints in received.calls[:2]] == [{"boss": 0, "helper": 1}, {"boss": 1, "helper": 0}]


def test_several_calls_of_the_runner_in_one_run(client: AsyncOpenAI, received: ReceivedHints) -> None:
    writer, critic = agent("writer"), agent("critic")

    async def main() -> None:
        async with workflow(client, "review", run="r-1") as run:
            await Runner.run(writer, "Hi", run_config=run.config())
            again = (Runner.run(one, "Hi", run_config=run.config()) for one in (writer, critic))
            await asyncio.gather(*again)

    asyncio.run(main())
    assert received.agents[0] == "writer" and sorted(received.agents[1:]) == ["critic", "writer"]
    assert {(hints.workflow, hints.run) for hints in received.all} == {("review", "r-1")}


@pytest.mark.parametrize("is_later", [False, True])
def test_the_given_config_stays_in_force(is_later: bool, client: AsyncOpenAI, received: ReceivedHints) -> None:
    def shout(data: CallModelData[Any]) -> ModelInputData:
        return ModelInputData(data.model_data.input, "LOUD")

    async def shout_later(data: CallModelData[Any]) -> ModelInputData:
        return shout(data)

    base = RunConfig(call_model_input_filter=shout_later if is_later else shout, workflow_name="mine")

    async def main() -> str:
        async with workflow(client, agent("first")) as run:
            assert run.config(base).workflow_name == "mine"
            return str((await Runner.run(agent("first"), "Hi", run_config=run.config(base))).final_output)

    assert "LOUD" in asyncio.run(main())
    assert base.call_model_input_filter in (shout, shout_later)
    assert received.agents == ["first"]


# its edges ------------------------------------------------------------------------------------------------------------


def test_handoffs_in_a_circle() -> None:
    first, second = agent("first"), agent("second")
    first.handoffs, second.handoffs = [second], [handoff(first)]
    assert step_graph(first).nodes == (
        Node("__start__"),
        Node("first", after=["__start__"], loops=["second"], then={"second": 0.5}),
        Node("second", after=["first"], then={"first": 0.5}),
    )


def test_a_tool_lets_an_agent_call_again_and_a_helper_of_two_reports_to_either() -> None:
    helper = agent("helper")
    tools = [helper.as_tool("ask", "Asks.")]
    found = {node.id: node for node in step_graph(agent("a", tools=tools, handoffs=[agent("b", tools=tools)])).nodes}
    assert found["a"].loops == ({"helper"},) and found["a"].then == pytest.approx({"b": 1 / 3, "helper": 1 / 3})
    assert found["helper"].then == pytest.approx({"a": 1 / 3, "b": 1 / 3})

    assert step_graph(agent("c", tools=[look_up])).nodes[1].loops == ({"c"},)


@pytest.fixture
def served() -> Iterator[Served]:
    with LocalEngine(config=EngineSettings(device="cpu")) as engine:
        engine.tokenizer.inner.chat_template = TEMPLATE
        settings = ServerSettings(tool_call_parser="hermes", model_name=agents.models.get_default_model())
        with serving(engine, settings) as running:
            yield running


def test_an_unchanged_team_hands_over_and_its_agents_are_linked(served: Served) -> None:
    first = answers(served.url)
    found = httpx.get(f"{served.url}/kedge/report").json()
    assert_linked(found, found["agents"])
    for by_chat, is_streamed in ((False, True), (True, False), (True, True)):
        again = answers(served.url, QUESTIONS[:2], by_chat=by_chat, is_streamed=is_streamed)
        assert again == first[:2], "whatever it speaks"
