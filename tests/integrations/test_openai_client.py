"""OpenAI's clients as they are, waiting and asynchronous, against a real server."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from kedge.integrations.openai_client import acting, workflow
from kedge.workflow.graph import Agent, Workflow
from kedge.workflow.step_graph import Node, StepGraph
from tests.integrations.conftest import ReceivedHints
from tests.server.conftest import FLOW, YAML

TEAM = Workflow(
    "team",
    (
        Agent("planner", "You plan.", "{user_question}"),
        Agent("writer", "You write.", "{agent_planner_current}"),
        Agent("critic", "You judge.", "{agent_writer_current}"),
    ),
)
INFINITE = float("inf")


@pytest.fixture
def client(received: ReceivedHints) -> openai.OpenAI:
    return received.served.client()


def ask(client: openai.OpenAI, **options: Any) -> Any:
    asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, **options}
    return client.chat.completions.create(model="kedge-nano", **asked)


def test_every_call_has_its_run_its_agent_and_a_forecast(client: openai.OpenAI, received: ReceivedHints) -> None:
    with workflow(client, TEAM, client_id="me") as run:
        for agent in ("planner", "writer", "critic"):
            ask(run.agent(agent))
    planner, writer, critic, end = received.all
    assert (planner.workflow, planner.agent, planner.run, planner.client) == ("team", "planner", run.id, "me")
    assert planner.steps == {"planner": 0, "writer": 1, "critic": 2}
    assert writer.steps == {"planner": INFINITE, "writer": 0, "critic": 1}
    assert critic.steps == {"planner": INFINITE, "writer": INFINITE, "critic": 0}
    assert (end.run, end.final) == (run.id, True)
    assert received.served.service.client_runs.board.ignored == 0


def test_the_given_client_stays_as_it_was(client: openai.OpenAI, received: ReceivedHints) -> None:
    with workflow(client, TEAM) as run:
        ask(client)
        ask(run.agent("planner"))
    assert [hints.agent for hints in received.all[:2]] == ["", "planner"]
    assert received.all[0].run == ""


@pytest.mark.parametrize("how", ["stream", "raw", "helper", "text", "copies", "responses", "null"])
def test_however_it_is_called(how: str, client: openai.OpenAI, received: ReceivedHints) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    with workflow(client, TEAM) as run:
        planner = run.agent("planner")
        if how == "stream":
            assert list(ask(planner, stream=True))
        elif how == "raw":
            planner.chat.completions.with_raw_response.create(model="kedge-nano", messages=messages, max_tokens=1)
        elif how == "helper":
            with planner.chat.completions.stream(model="kedge-nano", messages=messages) as stream:
                assert stream.get_final_completion().choices
        elif how == "copies":
            ask(planner.with_options(timeout=5).copy(max_retries=0))
        elif how == "responses":
            planner.responses.create(model="kedge-nano", input="Hi", max_output_tokens=16)
        elif how == "null":
            ask(planner, extra_body={"kedge": None})
        else:
            planner.completions.create(model="kedge-nano", prompt="Hi", max_tokens=1)
        ask(run.agent("writer"))
    assert received.agents == ["planner", "writer"]
    assert received.calls[1].steps == {"planner": INFINITE, "writer": 0, "critic": 1}


def test_other_routes_are_left_alone(client: openai.OpenAI, received: ReceivedHints) -> None:
    with workflow(client, TEAM) as run:
        assert run.agent("planner").models.list().data
    assert not received.calls


def test_calls_deep_in_the_code(client: openai.OpenAI, received: ReceivedHints) -> None:
    with workflow(client, TEAM) as run:
        with acting("planner"):
            ask(run.client)
        ask(run.client)
    assert [hints.agent for hints in received.all] == ["planner", "", ""]
    assert received.all[1].steps == {"planner": INFINITE, "writer": 0, "critic": 1}


def test_hints_of_the_call_itself_win(client: openai.OpenAI, received: ReceivedHints) -> None:
    with workflow(client, TEAM) as run:
        ask(run.agent("planner"), extra_body={"kedge": {"reuse": "off", "agent": "other"}, "session_id": "s"})
    (hints,) = received.calls
    assert (hints.agent, hints.reuse, hints.session, hints.run) == ("other", "off", "s", run.id)


def test_a_registered_workflow_is_followed_by_the_server(client: openai.OpenAI, received: ReceivedHints) -> None:
    httpx.post(f"{received.url}/workflows", content=FLOW, headers=YAML).raise_for_status()
    bound = {"kedge": {"bindings": {"user_question": "Q"}}}
    with workflow(client, "pair") as run:
        for agent in ("first", "last"):
            assert ask(run.agent(agent), messages=[], extra_body=bound).choices[0].message.content
    assert [hints.steps for hints in received.calls] == [None, None]
    assert received.served.service.client_runs.board.ignored == 0


def test_a_run_with_an_id_goes_on_in_another_block(client: openai.OpenAI, received: ReceivedHints) -> None:
    loop = StepGraph("loop", (Node("asker", loops=["answerer"]), Node("answerer", after=["asker"])))
    for _ in range(2):
        with workflow(client, loop, run="talk") as run:
            ask(run.agent("asker"))
    assert [hints.steps for hints in received.all] == [{"asker": 0, "answerer": 1}, {}] * 2
    assert received.served.service.client_runs.board.ignored == 0


def test_an_error_reaches_the_caller_and_the_run_goes_on(client: openai.OpenAI, received: ReceivedHints) -> None:
    with workflow(client, TEAM) as run:
        with pytest.raises(openai.BadRequestError):
            ask(run.agent("planner"), logit_bias={"5": 1})
        ask(run.agent("writer"))
    assert received.calls[-1].steps == {"planner": INFINITE, "writer": 0, "critic": 1}


def test_the_end_of_a_run_with_no_server_is_no_error() -> None:
    gone = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none")
    with workflow(gone, TEAM):
        pass

    async def later() -> None:
        async with workflow(openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="none"), TEAM):
            pass

    asyncio.run(later())


def test_asynchronous_runs_at_once(received: ReceivedHints) -> None:
    client: Any = openai.AsyncOpenAI(base_url=received.url, api_key="none", max_retries=0)

    async def team() -> str:
        async with workflow(client, TEAM) as run:
            with acting("planner"):
                await ask(run.client)
            await asyncio.gather(ask(run.agent("writer")), ask(run.agent("writer")))
            assert [chunk async for chunk in await ask(run.agent("critic"), stream=True)]
        return run.id

    async def main() -> list[str]:
        return await asyncio.gather(*(team() for _ in range(3)))

    for run in asyncio.run(main()):
        own = [hints for hints in received.all if hints.run == run]
        assert [hints.agent for hints in own] == ["planner", "writer", "writer", "critic", ""]
        assert own[3].steps == {"planner": INFINITE, "writer": INFINITE, "critic": 0}
        assert own[-1].final
