"""A team on LangGraph whose code knows nothing of Kedge is translated, and with the adapter's hints no less."""

from __future__ import annotations

import json
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Annotated, Any, TypedDict

import httpx
import pytest

from kedge.engine.local.engine import LocalEngine
from kedge.runner.run import tool_result
from kedge.settings import DiscoveryMode, EngineSettings, ServerSettings
from kedge.types import Source, ValueKind
from kedge.workflow.graph import Agent
from kedge.workflow.template import parse
from kedge.workloads.base import QUESTION, Question
from kedge.workloads.miniature import MATH, questions
from tests.server.conftest import serving

pytest.importorskip("langchain_openai", reason="LangGraph's client is not installed")

from langchain_openai import ChatOpenAI  # noqa: E402
from langgraph.graph import START, StateGraph  # noqa: E402

from kedge.integrations import langgraph as adapter  # noqa: E402

MODEL = "kedge-nano"
TEAM = MATH.workflow().agents
QUESTIONS = 9


class State(TypedDict):
    """What placeholders stand for."""

    values: Annotated[dict[str, str], operator.or_]


def graph_of(client: Any) -> Any:
    """The task's team: one node for each agent, which runs when all those whose answers it reads have answered."""
    builder: Any = StateGraph(State)
    for agent in TEAM:
        builder.add_node(f"agent {agent.id}", node_of(agent, client))
    for agent in TEAM:
        read = {f"agent {one.of}" for one in agent.placeholders if one.kind is not ValueKind.INPUT}
        builder.add_edge(sorted(read) if read else START, f"agent {agent.id}")
    return builder.compile()


def filled(template: str, values: Mapping[str, str]) -> str:
    return "".join(part if isinstance(part, str) else values[part.name] for part in parse(template))


def node_of(agent: Agent, client: Any) -> Callable[[State], Mapping[str, Any]]:
    def node(state: State) -> Mapping[str, Any]:
        messages = [("system", filled(agent.system, state["values"])), ("user", filled(agent.user, state["values"]))]
        text = str(client.invoke(messages, max_tokens=agent.max_tokens).content)
        news = {f"agent_{agent.id}_current": text}
        if agent.tool:
            known = {**state["values"], **news}
            news[f"condition_{agent.id}_current"] = tool_result(agent, text, known, "text")
        return {"values": news}

    return node


def right(values: Mapping[str, str], question: Question) -> int:
    """How many agents answered rightly."""
    return sum(bool(MATH.right(one.id, values[f"agent_{one.id}_current"], question)) for one in TEAM)


def served(mode: DiscoveryMode, adapted: bool) -> Counter[str]:
    """Answers the questions; calls, translated calls, right answers, and tokens by source."""
    seen: Counter[str] = Counter()

    def take(response: httpx.Response) -> None:
        (receipt,) = json.loads(response.read())["kedge"]["receipts"]
        seen.update(receipt["tokens"], calls=1, translated_calls=receipt["tokens"][Source.TRANSLATED.value] > 0)

    config = EngineSettings(planner={"by_cost": False}, guard={"mode": "off"}, discovery={"mode": mode})
    with (
        LocalEngine(config=config) as engine,
        serving(engine, ServerSettings(model_name=MODEL)) as server,
        httpx.Client(event_hooks={"response": [take]}) as http,
    ):
        kind: Any = adapter.ChatOpenAI if adapted else ChatOpenAI
        client = kind(model=MODEL, base_url=f"{server.url}/v1", api_key="none", temperature=0, http_client=http)
        graph = adapter.attach(graph_of(client)) if adapted else graph_of(client)
        for question in islice(questions(0), QUESTIONS):
            engine.wait_idle()
            seen["right"] += right(graph.invoke({"values": {QUESTION: question.text}})["values"], question)
    return seen


def reused(seen: Counter[str]) -> float:
    return 1 - seen[Source.COMPUTED.value] / sum(seen[source.value] for source in Source)


def test_an_unchanged_graph_is_translated_and_answers_as_without() -> None:
    stock = served(DiscoveryMode.OFF, adapted=False)
    plain = served(DiscoveryMode.TRANSLATE, adapted=False)
    hinted = served(DiscoveryMode.TRANSLATE, adapted=True)
    assert {one["calls"] for one in (stock, plain, hinted)} == {45}
    assert hinted["translated_calls"] >= plain["translated_calls"] > 0 == stock["translated_calls"]
    assert reused(hinted) >= reused(plain) > reused(stock) > 0
    assert {one["right"] for one in (stock, plain, hinted)} == {36}, "all but the programmer's are scored"
