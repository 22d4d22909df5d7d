"""The bundled model's teams as plain chats: how many calls are translated without a word of the application.

An application as anyone writes it: OpenAI's client, one chat per agent, texts put together by the application. It
talks to a server over HTTP. Hints are tried on an engine of their own, through Kedge's runner.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kedge.bench.demo import answer, questions
from kedge.engine.local.engine import LocalEngine
from kedge.guard import GuardMode
from kedge.runner.run import tool_result
from kedge.settings import (
    DiscoveryMode,
    DiscoverySettings,
    EngineSettings,
    GuardSettings,
    PlannerSettings,
    ServerSettings,
)
from kedge.types import ReuseMode
from kedge.workflow.graph import Agent
from kedge.workflow.template import parse
from kedge.workloads.base import QUESTION, Question
from kedge.workloads.miniature import TASKS, Task, workflow

if TYPE_CHECKING:
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
