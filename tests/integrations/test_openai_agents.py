"""The OpenAI Agents SDK as it is, against a real server.

The bundled model writes tool calls only where a grammar makes it (`test_handoffs.py`), and a handoff is one. So what a
model decides is scripted: mostly in front of the client, whose calls are made all the same, and once in the engine, so
that the server reads the handoffs itself.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from agents import Agent, ModelProvider, OpenAIProvider, RunConfig, Runner, function_tool, handoff
from agents.items import ModelResponse, TResponseStreamEvent
from agents.models.interface import Model
from agents.result import RunResultBase
from agents.run import CallModelData, ModelInputData
from agents.testing import assistant_message, function_call
from openai import AsyncOpenAI

from kedge import LocalEngine
from kedge.engine.echo import EchoEngine
from kedge.integrations.openai_agents import step_graph, workflow
from kedge.settings import ServerSettings
from kedge.types import GenerateRequest
from kedge.workflow.step_graph import Node
from tests.integrations.conftest import ReceivedHints, recording
from tests.server.conftest import serving
from tests.server.talking import Templated

INFINITE = float("inf")


class Deciding(Model):
    """A model that calls the server, and then does what a script says: a tool's name, or nothing for its answer."""

    def __init__(self, inner: Model, script: list[str]) -> None:
        self.inner, self.script = inner, script

    async def get_response(self, *_: Any, **call: Any) -> ModelResponse:
        real = await self.inner.get_response(**{**call, "input": "…", "tools": [], "handoffs": []})
        decided = self.script.pop(0)
        output = function_call(decided, {"input": "?"}, call_id=f"c{len(self.script)}") if decided else None
        return ModelResponse([output or assistant_message("done")], real.usage, None)

    def stream_response(self, *_: Any, **__: Any) -> AsyncIterator[TResponseStreamEvent]:
        raise NotImplementedError


class Decided(ModelProvider):
    """The models of a client, all with one script."""

    def __init__(self, client: AsyncOpenAI, script: Sequence[str]) -> None:
        self.inner, self.script = OpenAIProvider(openai_client=client, use_responses=False), [*script]

    def get_model(self, model_name: str | None) -> Model:
        return Deciding(self.inner.get_model(model_name), self.script)


@pytest.fixture
def client(received: ReceivedHints) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=received.url, api_key="none", max_retries=0)


def agent(name: str, **options: Any) -> Agent[Any]:
    return Agent(name, instructions=f"You are {name}.", model="kedge-nano", **options)


def decide(client: AsyncOpenAI, first: Agent[Any], script: Sequence[str]) -> None:
    async def main() -> None:
        async with workflow(client, first) as run:
            config = run.config()
            config.model_provider = Decided(run.client, script)
            await Runner.run(first, "Hi", run_config=config)

    asyncio.run(main())


# hints ----------------------------------------------------------------------------------------------------------------


def test_handoffs_are_steps(client: AsyncOpenAI, received: ReceivedHints) -> None:
    clerk = agent("clerk")
    triage = agent("triage", handoffs=[agent("billing", handoffs=[clerk]), handoff(agent("support"))])
    decide(client, triage, ["transfer_to_billing", "transfer_to_clerk", ""])
    first, second, third, end = received.all
    assert (first.workflow, first.agent) == ("triage", "triage")
    assert first.steps == {"triage": 0, "billing": 1, "support": 1, "clerk": 2}
    assert (second.agent, second.steps) == (
        "billing",
        {"triage": INFINITE, "billing": 0, "support": INFINITE, "clerk": 1},
    )
    assert third.agent == "clerk"
    assert (end.run, end.final) == (first.run, True)


def test_agents_as_tools_report_back(client: AsyncOpenAI, received: ReceivedHints) -> None:
    @function_tool
    def look_up(input: str) -> str:
        return input

    helper = agent("helper")
    boss = agent("boss", tools=[helper.as_tool("ask_helper", "Asks."), look_up])
    decide(client, boss, ["ask_helper", "", "look_up", ""])
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


def test_a_streamed_run(client: AsyncOpenAI, received: ReceivedHints) -> None:
    first = agent("first")

    async def main() -> str:
        async with workflow(client, first) as run:
            streamed = Runner.run_streamed(first, "Hi", run_config=run.config())
            async for _ in streamed.stream_events():
                pass
            return str(streamed.final_output)

    assert "Hi" in asyncio.run(main())
    assert [(hints.agent, hints.steps) for hints in received.calls] == [("first", {"first": 0})]


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


# handoffs that the server reads ---------------------------------------------------------------------------------------


def scripted(request: GenerateRequest) -> str:
    """Answer as a model would that hands over; the clerk looks something up before it answers."""
    if request.agent == "triage":
        return call_of("transfer_to_clerk")
    if b"rain" not in bytes(token for token in request.tokens if token < 256):
        return f"Let me see. {call_of('look_up', town='Bergen')}"
    return "Take an umbrella."


def call_of(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_handoff_and_a_tool_that_the_server_reads(is_streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    @function_tool
    def look_up(town: str) -> str:
        return f"rain in {town}"

    clerk = agent("clerk", tools=[look_up])
    triage = agent("triage", handoffs=[clerk, agent("support")])
    engine = EchoEngine(scripted)
    engine.tokenizer = Templated()
    with recording(engine, ServerSettings(tool_call_parser="hermes"), monkeypatch) as received:
        result = asyncio.run(answer(AsyncOpenAI(base_url=received.url, api_key="none"), triage, is_streamed))
    assert (result.final_output, result.last_agent.name) == ("Take an umbrella.", "clerk")
    assert received.agents == ["triage", "clerk", "clerk"]
    first, second, third = received.calls
    assert first.steps == {"triage": 0, "clerk": 1, "support": 1}
    assert second.steps is not None and second.steps["clerk"] == 0
    assert {hints.run for hints in received.all} == {first.run} and received.all[-1].final
    assert "rain in Bergen" in bytes(t for t in engine.requests[-1].tokens if t < 256).decode()
    assert third.agent == engine.requests[-1].agent


async def answer(client: AsyncOpenAI, first: Agent[Any], is_streamed: bool) -> RunResultBase:
    async with workflow(client, first) as run:
        if not is_streamed:
            return await Runner.run(first, "How is the weather?", run_config=run.config())
        streamed = Runner.run_streamed(first, "How is the weather?", run_config=run.config())
        async for _ in streamed.stream_events():
            pass
        return streamed


def test_the_bundled_model_reads_no_tools_and_answers_without() -> None:
    with LocalEngine() as engine, serving(engine, ServerSettings(tool_call_parser="hermes")) as served:
        client = AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        triage = agent("triage", handoffs=[agent("clerk")])
        assert asyncio.run(answer(client, triage, is_streamed=False)).last_agent is triage


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

    @function_tool
    def look_up() -> str:
        return ""

    assert step_graph(agent("c", tools=[look_up])).nodes[1].loops == ({"c"},)
