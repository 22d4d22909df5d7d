"""LangGraph applications with branches, loops, joins and subgraphs. Their choices are random."""

import operator
from collections.abc import Callable, Sequence
from random import Random
from typing import Annotated, Any, Literal, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command, Send

Graph = CompiledStateGraph[Any, Any, Any, Any]
Answers = dict[str, list[str]]


class State(TypedDict):
    """All answers of the model."""

    answers: Annotated[list[str], operator.add]


class Team:
    """Builds graphs whose nodes call one model."""

    def __init__(self, llm: ChatOpenAI, seed: int = 0) -> None:
        self.llm, self.random = llm, Random(seed)

    def speaker(self, name: str, calls: int = 1) -> Callable[[State], Answers]:
        """A node that calls the model."""

        def speak(state: State) -> Answers:  # noqa: ARG001 (LangGraph's signature)
            return {"answers": [str(self.llm.invoke(f"{name} {call}").content) for call in range(calls)]}

        return speak

    def draw(self, *targets: str) -> Callable[[State], str]:
        """A conditional edge."""
        return lambda _: self.random.choice(targets)

    def graph(self, *names: str, quiet: Sequence[str] = ()) -> StateGraph[State]:
        """Nodes that call the model, and some that do not, without edges."""
        builder = StateGraph(State)
        for name in names:
            builder.add_node(name, self.speaker(name))
        for name in quiet:
            builder.add_node(name, lambda _: {"answers": []})
        return builder


def review(team: Team) -> Graph:
    """A loop around a chain, with a node that calls no model in it."""
    builder = team.graph("planner", "writer", "reviewer", "publisher", quiet=["search"])
    for pair in ((START, "planner"), ("planner", "search"), ("search", "writer"), ("writer", "reviewer")):
        builder.add_edge(*pair)
    builder.add_conditional_edges("reviewer", team.draw("planner", "publisher"), ["planner", "publisher"])
    return builder.compile()


def parallel(team: Team) -> Graph:
    """Branches at once, of different lengths, and a join that waits for all of them."""
    builder = team.graph("splitter", "left", "left_again", "right", "merger")
    for pair in ((START, "splitter"), ("splitter", "left"), ("splitter", "right"), ("left", "left_again")):
        builder.add_edge(*pair)
    builder.add_edge(["left_again", "right"], "merger")
    return builder.compile()


def nested(team: Team) -> Graph:
    """A subgraph with a loop of its own, in a loop."""
    inner = team.graph("draft", "critic")
    inner.add_edge(START, "draft")
    inner.add_edge("draft", "critic")
    inner.add_conditional_edges("critic", team.draw("draft", END), ["draft", END])
    builder = team.graph("asker", "judge")
    builder.add_node("writing", inner.compile())
    for pair in ((START, "asker"), ("asker", "writing"), ("writing", "judge")):
        builder.add_edge(*pair)
    builder.add_conditional_edges("judge", team.draw("asker", END), ["asker", END])
    return builder.compile()


def commanded(team: Team) -> Graph:
    """Nodes that choose the next one themselves, and an agent that calls several times."""

    def triage(_: State) -> Command[Literal["billing", "support"]]:
        team.llm.invoke("triage")
        return Command(goto=team.draw("billing", "support")({"answers": []}))

    builder = team.graph("support", "closing")
    builder.add_node("triage", triage)
    builder.add_node("billing", team.speaker("billing", calls=2))
    for pair in ((START, "triage"), ("billing", "closing"), ("support", "closing")):
        builder.add_edge(*pair)
    return builder.compile()


def mapped(team: Team) -> Graph:
    """One node many times at once."""
    builder = team.graph("planner", "worker", "reducer")
    builder.add_edge(START, "planner")
    sends = lambda _: [Send("worker", {"answers": []}) for _ in range(team.random.randint(2, 4))]  # noqa: E731
    builder.add_conditional_edges("planner", sends, ["worker"])
    builder.add_edge("worker", "reducer")
    return builder.compile()


def uneven(team: Team) -> Graph:
    """Parallel branches that meet without a join, so that the nodes after them run twice."""
    builder = team.graph("splitter", "short", "long", "longer", "teller", "closing")
    for pair in ((START, "splitter"), ("splitter", "short"), ("splitter", "long"), ("long", "longer")):
        builder.add_edge(*pair)
    for pair in (("short", "teller"), ("longer", "teller"), ("teller", "closing")):
        builder.add_edge(*pair)
    return builder.compile()


def swarm(team: Team) -> Graph:
    """Anyone may hand over to anyone."""
    names = ("alice", "bob", "carol")
    builder = team.graph(*names)
    builder.add_edge(START, "alice")
    for name in names:
        others = [other for other in (*names, END) if other != name]
        builder.add_conditional_edges(name, team.draw(*others), others)
    return builder.compile()


GRAPHS = (review, parallel, nested, commanded, mapped, uneven, swarm)
QUIET = {"search"}
"""Nodes that call no model, and so are no agents of the server."""
