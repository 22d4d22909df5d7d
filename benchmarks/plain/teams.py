"""The bundled model's teams as plain chats: how many calls are translated without a word of the application.

An application as anyone writes it: OpenAI's client, one chat per agent, texts put together by the application. It
talks to a server over HTTP. Hints are tried on an engine of their own, through Kedge's runner.
"""

from __future__ import annotations

import json
import operator
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from kedge.bench.demo import answer, questions
from kedge.engine.local.engine import LocalEngine
from kedge.guard import GuardMode
from kedge.runner.tools import tool_result
from kedge.settings import (
    DiscoveryMode,
    DiscoverySettings,
    EngineSettings,
    GuardSettings,
    PlannerSettings,
    ServerSettings,
)
from kedge.types import ReuseMode, Source, ValueKind
from kedge.workflow.graph import Agent
from kedge.workflow.template import parse
from kedge.workloads.base import QUESTION, Question
from kedge.workloads.miniature import TASKS, Task, workflow

if TYPE_CHECKING:
    import httpx
    from openai import OpenAI


Progress = Callable[[str], None]
MODEL = "kedge-nano"
START_S = 60.0
"""Seconds in which a server starts"""


@dataclass(frozen=True)
class PlainTeamSettings:
    """The teams and the number of questions for each."""

    questions: int = 50
    tasks: Sequence[str] = tuple(TASKS)
    seed: int = 0


QUICK_TEAMS = PlainTeamSettings(questions=12, tasks=("choice",))


@dataclass
class PlainScore:
    """A team's calls, and its right answers by agent."""

    right: dict[str, int] = field(default_factory=dict)
    finals: list[str | None] = field(default_factory=list)
    calls: int = 0
    translated_calls: int = 0


@dataclass(frozen=True)
class PlainTeamResult:
    """One team: plain, by dense prefill, and hinted."""

    plain: PlainScore
    dense: PlainScore
    hinted_calls: int
    """Translated calls with hints"""
    agents: tuple[int, int]
    """Agents that were found, and that there are"""

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results; accuracy is that of all agents together."""
        same = sum(a == b for a, b in zip(self.plain.finals, self.dense.finals, strict=True))
        return {
            "calls": self.plain.calls,
            "translated_calls_hinted": self.hinted_calls,
            "translated_calls_plain": self.plain.translated_calls,
            "accuracy_dense": round(sum(self.dense.right.values()) / self.dense.calls, 4),
            "accuracy_plain": round(sum(self.plain.right.values()) / self.plain.calls, 4),
            "same_final_answer": round(same / len(self.plain.finals), 4),
        }


def measure_teams(settings: PlainTeamSettings, progress: Progress) -> dict[str, PlainTeamResult]:
    """Let all teams answer. The results are by task."""
    return {name: _measure(TASKS[name], settings, progress) for name in settings.tasks}


def _measure(task: Task, settings: PlainTeamSettings, progress: Progress) -> PlainTeamResult:
    asked = questions(task, settings.questions, settings.seed)
    progress(f"{task.name}: hinted")
    with engine_with(DiscoveryMode.OFF) as engine:
        hinted = answer(engine, task, asked, ReuseMode.TRANSLATE, engine.wait_idle)
    with engine_with(DiscoveryMode.TRANSLATE) as engine, client_of(engine) as client:
        plain, dense = _PlainTeam(client, task, {}), _PlainTeam(client, task, {"kedge": {"reuse": "off"}})
        for team in (plain, dense):
            progress(f"{task.name}: {'plain' if team is plain else 'dense'}")
            for question in asked:
                engine.wait_idle()
                team.answer(question)
        figures: Any = engine.inspect()["discovery"]
    calls = sum(one.translated_calls for one in hinted.agents.values())
    return PlainTeamResult(plain.score, dense.score, calls, (figures["agents"], len(task.roles)))


def engine_with(mode: DiscoveryMode) -> LocalEngine:
    """Return an engine that translates whatever it costs: the bundled model is too small to gain by it."""
    planner = PlannerSettings(by_cost=False)
    return LocalEngine(
        config=EngineSettings(
            planner=planner, guard=GuardSettings(mode=GuardMode.OFF), discovery=DiscoverySettings(mode=mode)
        )
    )


@contextmanager
def client_of(engine: LocalEngine) -> Iterator[OpenAI]:
    """Serve an engine on a free port, and yield a client of it."""
    import uvicorn
    from openai import OpenAI

    from kedge.server.app import create_app

    server = uvicorn.Server(
        uvicorn.Config(create_app(engine, ServerSettings(model_name=MODEL)), port=0, log_level="warning")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + START_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise TimeoutError("the server did not start")
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    finally:
        server.should_exit = True
        thread.join(START_S)


@dataclass(frozen=True)
class _PlainTeam:
    """An application that answers questions with a team, by one chat for each agent."""

    client: OpenAI
    task: Task
    extra: Mapping[str, Any]
    """Further fields of its bodies"""
    score: PlainScore = field(default_factory=PlainScore)

    def answer(self, question: Question) -> None:
        values, text = {QUESTION: question.text}, ""
        for agent in workflow(self.task).agents:
            text = self._chat(agent, values)
            right = self.score.right.get(agent.id, 0) + bool(self.task.role(agent.id).correct(text, question))
            self.score.right[agent.id] = right
            values[f"agent_{agent.id}_current"] = text
            if agent.tool:
                values[f"condition_{agent.id}_current"] = tool_result(agent, text, values, "text")
        self.score.finals.append(self.task.final(text))

    def _chat(self, agent: Agent, values: Mapping[str, str]) -> str:
        messages: Any = [
            {"role": role, "content": filled(text, values)}
            for role, text in (("system", agent.system), ("user", agent.user))
        ]
        done = self.client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=agent.max_tokens, extra_body=dict(self.extra)
        )
        self.score.calls += 1
        self.score.translated_calls += (done.model_extra or {})["kedge"]["receipts"][0]["tokens"]["translated"] > 0
        return done.choices[0].message.content or ""


def filled(template: str, values: Mapping[str, str]) -> str:
    return "".join(part if isinstance(part, str) else values[part.name] for part in parse(template))


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
            found[name][lane] = _measure_graph(TASKS[name], lane, mode, settings)
    return found


def _measure_graph(task: Task, lane: str, mode: DiscoveryMode, settings: PlainTeamSettings) -> GraphScore:
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
