"""The bundled model's teams as LangGraph applications: one node for each agent, and LangChain's own client.

The same graphs run on prefix caching alone; as they are, with what Kedge finds out by itself; and with Kedge's adapter
(`kedge.integrations.langgraph`), which sends hints on top of that.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from kedge.bench.demo import questions
from kedge.bench.plain.teams import MODEL, PlainTeamSettings, Progress, client_of, engine_with, filled
from kedge.runner.run import tool_result
from kedge.settings import DiscoveryMode
from kedge.types import Source, ValueKind
from kedge.workflow.graph import Agent
from kedge.workloads.base import QUESTION, Question
from kedge.workloads.miniature import TASKS, Task, workflow

if TYPE_CHECKING:
    import httpx

STOCK, ADAPTER, PLAIN = "stock", "adapter", "plain"
LANES = {STOCK: DiscoveryMode.OFF, ADAPTER: DiscoveryMode.TRANSLATE, PLAIN: DiscoveryMode.TRANSLATE}


@dataclass
class GraphScore:
    """Calls of one lane, and the sources of their prompts' tokens."""

    calls: int = 0
    translated_calls: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    right: int = 0

    def take(self, response: httpx.Response) -> None:
        """Count an answer of the server by its receipt."""
        (receipt,) = json.loads(response.read())["kedge"]["receipts"]
        self.calls += 1
        self.translated_calls += receipt["tokens"][Source.TRANSLATED.value] > 0
        for source, count in receipt["tokens"].items():
            self.tokens[source] = self.tokens.get(source, 0) + count

    def as_json(self) -> dict[str, Any]:
        """Return the share of prompt tokens that were not computed, and of answers that were right."""
        computed, total = self.tokens[Source.COMPUTED.value], sum(self.tokens.values())
        return {
            "calls": self.calls,
            "translated_calls": self.translated_calls,
            "reused": round(1 - computed / total, 4),
            "accuracy": round(self.right / self.calls, 4),
        }


def measure_langgraph(settings: PlainTeamSettings, progress: Progress) -> dict[str, dict[str, GraphScore]]:
    """Let all teams answer in each lane. The scores are by task and lane."""
    found: dict[str, dict[str, GraphScore]] = {}
    for name in settings.tasks:
        found[name] = {}
        for lane, mode in LANES.items():
            progress(f"{name} on LangGraph: {lane}")
            found[name][lane] = _measure(TASKS[name], lane, mode, settings)
    return found


def _measure(task: Task, lane: str, mode: DiscoveryMode, settings: PlainTeamSettings) -> GraphScore:
    import httpx

    score = GraphScore()
    with (
        engine_with(mode) as engine,
        client_of(engine) as client,
        httpx.Client(event_hooks={"response": [score.take]}) as http,
    ):
        team = _GraphTeam(task, lane == ADAPTER, str(client.base_url), http)
        for question in questions(task, settings.questions, settings.seed):
            engine.wait_idle()
            score.right += team.answer(question)
    return score


class _State(TypedDict):
    """What placeholders stand for."""

    values: Annotated[dict[str, str], operator.or_]


class _GraphTeam:
    """A team as a compiled graph."""

    def __init__(self, task: Task, adapted: bool, url: str, http: httpx.Client) -> None:
        """Build the graph; with Kedge's adapter if `adapted`."""
        from langchain_openai import ChatOpenAI
        from langgraph.graph import StateGraph

        from kedge.integrations import langgraph as adapter

        self._task, self._agents = task, workflow(task).agents
        client = adapter.ChatOpenAI if adapted else ChatOpenAI
        self._model: Any = client(model=MODEL, base_url=url, api_key="none", temperature=0, http_client=http)
        builder: Any = StateGraph(_State)
        for agent in self._agents:
            builder.add_node(_node(agent.id), self._ask(agent))
        for start, end in _edges(self._agents):
            builder.add_edge(start, end)
        graph = builder.compile()
        self._graph = adapter.attach(graph) if adapted else graph

    def answer(self, question: Question) -> int:
        """Let the team answer. Returns how many agents were right."""
        values = self._graph.invoke({"values": {QUESTION: question.text}})["values"]
        answers = {agent.id: values[f"agent_{agent.id}_current"] for agent in self._agents}
        return sum(bool(self._task.role(agent).correct(text, question)) for agent, text in answers.items())

    def _ask(self, agent: Agent) -> Callable[[_State], Mapping[str, Any]]:
        def node(state: _State) -> Mapping[str, Any]:
            values = state["values"]
            messages = [("system", filled(agent.system, values)), ("user", filled(agent.user, values))]
            text = str(self._model.invoke(messages, max_tokens=agent.max_tokens).content)
            news = {f"agent_{agent.id}_current": text}
            if agent.tool:
                news[f"condition_{agent.id}_current"] = tool_result(agent, text, {**values, **news}, "text")
            return {"values": news}

        return node


def _node(agent: str) -> str:
    return f"agent {agent}"


def _edges(agents: Iterable[Agent]) -> list[tuple[Any, str]]:
    """Return the edges of a team: an agent runs when all those whose answers it reads have answered."""
    from langgraph.graph import START

    edges = []
    for agent in agents:
        read = {_node(one.of) for one in agent.placeholders if one.kind is not ValueKind.INPUT}
        edges.append((sorted(read) if read else START, _node(agent.id)))
    return edges
