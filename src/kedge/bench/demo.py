"""The demo: a team answers questions with dense prefill and with translated KV, side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from kedge.engine.base import Engine
from kedge.engine.common.watched import WatchedEngine, WatchedStream, Watcher
from kedge.runner.run import RunResult, run
from kedge.types import AgentId, GenerateRequest, ReuseMode
from kedge.workflow.graph import Workflow
from kedge.workloads import real
from kedge.workloads.base import QUESTION, Question, Team
from kedge.workloads.miniature import MATH, questions


@dataclass
class AgentScore:
    """One agent's scores, times and prompt tokens over all questions."""

    agent: AgentId
    ttft_ms: list[float] = field(default_factory=list)
    correct: int = 0
    """Answers that are right, of those that are scored"""
    translated_calls: int = 0
    exact: int = 0
    translated: int = 0
    computed: int = 0
    is_scored: bool = True
    """Whether its answers can be right or wrong"""

    @property
    def calls(self) -> int:
        """Number of calls."""
        return len(self.ttft_ms)

    @property
    def accuracy(self) -> float | None:
        """Share of calls with a correct answer; None for an agent without a scored one."""
        return self.correct / self.calls if self.is_scored else None

    @property
    def reuse_rate(self) -> float:
        """Share of calls that translated (the paper's definition)."""
        return self.translated_calls / self.calls

    @property
    def ttft_median(self) -> float:
        """Median TTFT in milliseconds."""
        return statistics.median(self.ttft_ms)

    @property
    def ttft_p90(self) -> float:
        """90th percentile of the TTFT in milliseconds."""
        return sorted(self.ttft_ms)[int(0.9 * (self.calls - 1))]


@dataclass
class TeamScore:
    """A team's answers to all questions in one mode."""

    agents: dict[AgentId, AgentScore]
    finals: list[str | None] = field(default_factory=list)
    """Decisions of the last agent, in the order of the questions."""
    runs: list[RunResult] = field(default_factory=list)

    @classmethod
    def of(cls, flow: Workflow) -> TeamScore:
        """Return a score without answers."""
        return cls({AgentId(agent.id): AgentScore(AgentId(agent.id)) for agent in flow.agents})

    def add(self, workload: Team, question: Question, result: RunResult) -> None:
        """Count one run of the team."""
        self.runs.append(result)
        for one in result.results:
            score, receipt = self.agents[one.agent], one.completion.receipt
            right = workload.right(one.agent, one.text, question)
            score.ttft_ms.append(one.completion.ttft_ms)
            score.correct, score.is_scored = score.correct + bool(right), right is not None
            score.translated_calls += receipt.translated > 0
            score.exact += receipt.exact
            score.translated += receipt.translated
            score.computed += receipt.computed
        self.finals.append(workload.final(result.text))

    @property
    def accuracy(self) -> float | None:
        """Share of questions that the last agent answers correctly."""
        return list(self.agents.values())[-1].accuracy

    @property
    def reuse_rate(self) -> float:
        """Share of all agents' calls that translated."""
        return sum(a.translated_calls for a in self.agents.values()) / sum(a.calls for a in self.agents.values())

    def tokens(self) -> dict[str, int]:
        """Return the team's prompt tokens by source."""
        sources = ("exact", "translated", "computed")
        return {source: sum(getattr(agent, source) for agent in self.agents.values()) for source in sources}


@dataclass(frozen=True)
class Comparison:
    """Both modes over the same questions."""

    dense: TeamScore
    translated: TeamScore

    @property
    def same_final_answer(self) -> float:
        """Share of questions with the same decision in both modes; an answer without a decision matches nothing."""
        pairs = zip(self.dense.finals, self.translated.finals, strict=True)
        return sum(a == b and a is not None for a, b in pairs) / len(self.dense.finals)

    @property
    def same_answers(self) -> float:
        """Share of answers of all agents but the first with the same text in both modes."""
        runs = zip(self.dense.runs, self.translated.runs, strict=True)
        pairs = [pair for one, other in runs for pair in zip(one.results[1:], other.results[1:], strict=True)]
        return sum(one.text == other.text for one, other in pairs) / max(1, len(pairs))

    def as_json(self) -> dict[str, object]:
        """Return the figures as written to a file of results."""
        agents = [
            {
                "agent": agent,
                "ttft_dense_ms": round(dense.ttft_median, 3),
                "ttft_dense_p90_ms": round(dense.ttft_p90, 3),
                "ttft_translated_ms": round(ours.ttft_median, 3),
                "ttft_translated_p90_ms": round(ours.ttft_p90, 3),
                "reuse_rate": ours.reuse_rate,
                "accuracy_dense": dense.accuracy,
                "accuracy_translated": ours.accuracy,
            }
            for agent, dense in self.dense.agents.items()
            for ours in [self.translated.agents[agent]]
        ]
        return {
            "agents": agents,
            "accuracy_dense": self.dense.accuracy,
            "accuracy_translated": self.translated.accuracy,
            "same_final_answer": self.same_final_answer,
            "same_answers": self.same_answers,
            "reuse_rate": self.translated.reuse_rate,
            "tokens": self.translated.tokens(),
        }


DEMO_TASKS = (MATH.name, *real.TEAMS)


def team(task: str, count: int, seed: int) -> tuple[Team, list[Question]]:
    """Return a team and its first questions: the bundled model's, or one of `kedge.workloads.real`.

    Raises `ConfigError` for an unknown task.
    """
    if task == MATH.name:
        return MATH, list(islice(questions(seed), count))
    workload, asked = real.load(task, None, seed)
    return workload, asked[:count]


class ConstrainedEngine(WatchedEngine):
    """An engine whose answers to one question of a team conform to that team's grammar."""

    def __init__(self, engine: Engine, workload: Team, question: Question) -> None:
        super().__init__(engine, Watcher())
        self._constrained = partial(workload.constrained, question)

    def submit(self, request: GenerateRequest) -> WatchedStream:
        return super().submit(self._constrained(request))


def answer(
    engine: Engine,
    workload: Team,
    asked: Iterable[Question],
    reuse: ReuseMode,
    settle: Callable[[], object],
    on_question: Callable[[TeamScore], None] = lambda _: None,
) -> TeamScore:
    """Answer all questions one after the other.

    Before each question `settle` waits until the engine is idle, so that its TTFT includes no learning from the one
    before; the agents of one question follow each other without a pause.
    """
    flow = workload.workflow()
    score = TeamScore.of(flow)
    for question in asked:
        settle()
        served = ConstrainedEngine(engine, workload, question)
        result = run(served, flow, {QUESTION: question.text}, reuse=reuse, on_tool_error="text")
        score.add(workload, question, result)
        on_question(score)
    return score
