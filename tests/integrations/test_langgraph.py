"""LangGraph and LangChain as they are, against a real server: the hints and forecasts of calls."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START
from langgraph.types import Command, interrupt

from kedge.hints import Hints
from kedge.integrations.langgraph import ChatOpenAI, attach, step_graph
from kedge.workflow.step_graph import Node
from tests.integrations.conftest import ReceivedHints
from tests.integrations.graphs import GRAPHS, QUIET, Graph, State, Team, nested, parallel, review, uneven
from tests.server.conftest import wait_until

NOTHING: Any = {"answers": []}
RUNS = 10
LEAST = {uneven: 0.7}
"""A node that runs twice because two branches meet without a join is forecast once."""


def model(received: ReceivedHints, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=received.model, base_url=received.url, api_key="none", max_tokens=1, max_retries=0, **options
    )


@pytest.fixture
def team(received: ReceivedHints) -> Team:
    return Team(model(received))


# hints ----------------------------------------------------------------------------------------------------------------


def test_the_run_is_the_thread_and_goes_on(team: Team, received: ReceivedHints) -> None:
    graph = attach(review(team))
    for _ in range(2):
        graph.invoke(NOTHING, {"configurable": {"thread_id": "t-1"}})
        wait_until(lambda: received.all[-1].steps == {})
    assert {hints.run for hints in received.all} == {"t-1"}
    assert not any(hints.final for hints in received.all)


def test_a_node_that_calls_no_model_sends_hints_of_its_own(team: Team, received: ReceivedHints) -> None:
    graph = attach(review(team))
    graph.invoke(NOTHING, {"configurable": {"thread_id": "quiet"}})
    wait_until(lambda: received.all[-1].steps == {})
    received.all.clear()
    graph.invoke(NOTHING, {"configurable": {"thread_id": "quiet"}})
    wait_until(lambda: bool(received.all) and received.all[-1].steps == {})
    *others, _ = received.aside
    assert others and all(hints.steps and hints.steps["search"] == 0 for hints in others)
    assert others[0].steps == {"planner": 3, "search": 0, "writer": 1, "reviewer": 2, "publisher": 3}


@pytest.mark.parametrize("how", ["stream", "ainvoke", "astream", "batch", "streaming model"])
def test_however_it_is_called(how: str, team: Team, received: ReceivedHints) -> None:
    if how == "streaming model":
        team.llm = model(received, streaming=True)
    graph = attach(nested(team))

    async def drain() -> None:
        async for _ in graph.astream(NOTHING, stream_mode="messages"):
            pass

    run: dict[str, Callable[[], object]] = {
        "stream": lambda: list(graph.stream(NOTHING, stream_mode="messages", subgraphs=True)),
        "ainvoke": lambda: asyncio.run(graph.ainvoke(NOTHING)),
        "astream": lambda: asyncio.run(drain()),
        "batch": lambda: graph.batch([NOTHING] * 3),
        "streaming model": lambda: graph.invoke(NOTHING),
    }
    run[how]()
    assert {"asker", "writing:draft", "writing:critic", "judge"} == {*received.agents}
    assert all(hints.steps and hints.steps[hints.agent] == 0 for hints in received.calls)


def test_asynchronous_calls_of_the_model(received: ReceivedHints) -> None:
    llm = model(received)

    async def speak(_: State) -> dict[str, list[str]]:
        await asyncio.gather(llm.ainvoke("one"), llm.ainvoke("two"))
        return {"answers": []}

    builder = Team(llm).graph("last").add_node("both", speak).add_edge(START, "both").add_edge("both", "last")
    asyncio.run(attach(builder.compile()).ainvoke(NOTHING))
    assert received.agents == ["both", "both", "last"]
    assert [hints.steps for hints in received.calls[:2]] == [{"both": 0, "last": 1}] * 2


def test_a_tool_that_calls_the_model_is_its_node(received: ReceivedHints) -> None:
    llm = model(received)

    @tool
    def ask(question: str) -> str:
        """Asks."""
        return str(llm.invoke(question).content)

    builder = Team(llm).graph("after").add_node("asking", lambda _: {"answers": [ask.invoke("what?")]})
    attach(builder.add_edge(START, "asking").add_edge("asking", "after").compile()).invoke(NOTHING)
    assert received.agents == ["asking", "after"]


def test_a_node_that_fails_ends_its_run(team: Team, received: ReceivedHints) -> None:
    def fail(_: State) -> dict[str, list[str]]:
        raise LookupError("nothing there")

    builder = team.graph("first").add_node("broken", fail).add_edge(START, "first").add_edge("first", "broken")
    graph = attach(builder.compile())
    with pytest.raises(LookupError):
        graph.invoke(NOTHING)
    wait_until(lambda: received.all[-1].final)
    received.all.clear()
    with pytest.raises(LookupError):
        graph.invoke(NOTHING)
    assert received.calls[0].steps == {"first": 0, "broken": 1}


def test_an_interrupted_run_goes_on_where_it_was(team: Team, received: ReceivedHints) -> None:
    builder = team.graph("first", "last").add_node("human", lambda _: {"answers": [interrupt("?")]})
    builder.add_edge(START, "first").add_edge("first", "human").add_edge("human", "last")
    graph = attach(builder.compile(checkpointer=InMemorySaver()))
    config: Any = {"configurable": {"thread_id": "interrupted"}}
    graph.invoke(NOTHING, config)
    graph.invoke(Command(resume="yes"), config)
    assert received.agents == ["first", "last"]
    assert received.calls[-1].steps and received.calls[-1].steps["last"] == 0


def test_runs_at_once_are_kept_apart(team: Team, received: ReceivedHints) -> None:
    graph = attach(parallel(team))
    threads = [threading.Thread(target=graph.invoke, args=(NOTHING,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    by_run: dict[str, list[Hints]] = {}
    for hints in received.calls:
        by_run.setdefault(hints.run, []).append(hints)
    assert len(by_run) == 4
    for calls in by_run.values():
        assert {hints.agent for hints in calls} == {"splitter", "left", "right", "left_again", "merger"}
        assert calls[0].steps == {"splitter": 0, "left": 1, "right": 1, "left_again": 2, "merger": 3}


def test_the_functional_api(received: ReceivedHints) -> None:
    llm = model(received)

    @task
    def write(topic: str) -> str:
        return str(llm.invoke(topic).content)

    @entrypoint()
    def flow(topic: str) -> str:
        llm.invoke("plan")
        return write(topic).result()

    attach(flow).invoke("x")
    assert received.agents == ["flow", "flow:write"]
    assert received.calls[1].steps == {"flow": 0}


def test_without_attach_a_call_has_its_run_and_agent(team: Team, received: ReceivedHints) -> None:
    nested(team).invoke(NOTHING, {"configurable": {"thread_id": "alone"}})
    assert {(hints.agent, hints.run, hints.steps) for hints in received.calls} == {
        (agent, "alone", None) for agent in ("asker", "writing:draft", "writing:critic", "judge")
    }


def test_an_attached_graph_inside_another_one(team: Team, received: ReceivedHints) -> None:
    inner = attach(team.graph("a", "b").add_edge(START, "a").add_edge("a", "b").compile(), "inner")
    team.graph().add_node("outer", lambda state: inner.invoke(state)).add_edge(START, "outer").compile().invoke(NOTHING)
    assert [(hints.workflow, hints.agent, hints.steps) for hints in received.calls] == [
        ("inner", "a", {"a": 0, "b": 1}),
        ("inner", "b", {"a": inf, "b": 0}),
    ]


def test_outside_of_graphs_nothing_is_sent(received: ReceivedHints) -> None:
    model(received).invoke("hello")
    assert received.all == [Hints()]


def test_a_prompt_that_is_too_long_is_an_overflow_after_which_langchain_compacts(received: ReceivedHints) -> None:
    with pytest.raises(ContextOverflowError):
        model(received).invoke("x" * 9000)


# forecasts ------------------------------------------------------------------------------------------------------------


def right(calls: list[Hints]) -> Iterator[bool]:
    """Yield, for each call after which another agent calls, whether that agent was among those with the lowest steps.
    Those that run already, with 0 steps, are not expected any more and do not count.
    """
    for now, then in pairwise(calls):
        if now.agent != then.agent:
            steps = now.steps or {}
            soonest = min(one for agent, one in steps.items() if one > 0 and agent not in QUIET)
            yield steps[then.agent] <= soonest and steps[then.agent] < inf


@pytest.mark.parametrize("build", GRAPHS, ids=lambda build: build.__name__)
def test_the_next_agent_is_among_those_with_the_lowest_steps(
    build: Callable[[Team], Graph], received: ReceivedHints
) -> None:
    team = Team(model(received))
    graph = attach(build(team))
    found: list[bool] = []
    for seed in range(RUNS):
        team.random.seed(seed)
        received.all.clear()
        graph.invoke(NOTHING, {"recursion_limit": 100})
        found += right(received.calls)
    assert len(found) >= RUNS and sum(found) >= LEAST.get(build, 0.95) * len(found)


# its edges ------------------------------------------------------------------------------------------------------------


def nodes(graph: Graph) -> dict[str, Node]:
    return {node.id: node for node in step_graph(graph).nodes}


def test_branches_loops_and_their_odds(team: Team) -> None:
    found = nodes(review(team))
    assert found["planner"] == Node("planner", after=["__start__"], loops=["reviewer"])
    assert found["reviewer"].then == {"planner": 0.5, "publisher": 0.5}
    assert found["publisher"].after == ({"reviewer"},)


def test_subgraphs_are_drawn_through(team: Team) -> None:
    found = nodes(nested(team))
    assert {*found} == {"__start__", "asker", "writing:draft", "writing:critic", "judge"}
    assert found["writing:draft"].after == ({"asker"},)
    assert found["writing:draft"].loops == ({"writing:critic"},)
    assert found["judge"].after == ({"writing:critic"},)
    assert found["judge"].then == {"asker": 0.5}


def test_a_join_of_subgraphs_that_begin_and_end_in_several_ways(team: Team) -> None:
    inner = team.graph("one", "two").add_edge(START, "one").add_edge(START, "two").compile()
    builder = team.graph("other", "after").add_node("sub", inner).add_edge(START, "sub").add_edge(START, "other")
    found = nodes(builder.add_edge(["sub", "other"], "after").compile())
    assert {*found} == {"__start__", "sub:one", "sub:two", "other", "after"}
    assert found["sub:two"].after == ({"__start__"},)
    assert set(found["after"].after) == {frozenset({"sub:one", "other"}), frozenset({"sub:two", "other"})}
