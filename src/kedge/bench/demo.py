"""The demo: a team answers questions with dense prefill and with translated KV, side by side."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from kedge.bench.flows import percentile
from kedge.engine.base import Engine
from kedge.runner.run import RunResult, run
from kedge.types import AgentId, ReuseMode
from kedge.workloads import real
from kedge.workloads.base import QUESTION, Question, Team
from kedge.workloads.miniature import MATH, questions

SOURCES = ("exact", "translated", "computed")


@dataclass(frozen=True)
class TeamScore:
    """A team's answers to all questions in one mode, and what came of them."""

    workload: Team
    answered: list[tuple[Question, RunResult]] = field(default_factory=list)

    def figures(self, agent: AgentId | None = None) -> dict[str, Any]:
        """Return the figures of an agent's calls, or of all: milliseconds to the first token, the share of right
        answers (None: they are neither right nor wrong), that of calls that translated (the paper's reuse rate), and
        prompt tokens.
        """
        calls = [(asked, one) for asked, result in self.answered for one in result.results]
        chosen = [(asked, one) for asked, one in calls if agent in (None, one.agent)]
        rights = [self.workload.right(one.agent, one.text, asked) for asked, one in chosen]
        scored = [right for right in rights if right is not None]
        receipts, ttft = zip(*((one.completion.receipt, one.completion.ttft_ms) for _, one in chosen), strict=True)
        return {
            "ttft_ms": round(statistics.median(ttft), 3),
            "ttft_p90_ms": percentile(list(ttft), 0.9, 3),
            "accuracy": statistics.fmean(scored) if scored else None,
            "reuse_rate": statistics.fmean(receipt.translated > 0 for receipt in receipts),
            "tokens": {source: sum(getattr(receipt, source) for receipt in receipts) for source in SOURCES},
        }


def compared(dense: TeamScore, ours: TeamScore) -> dict[str, Any]:
    """Return the figures of both modes over the same questions, as written to a file of results.

    An answer without a decision is the same as no other. `same_answers` is the share of answers of all agents but the
    first with the same text in both modes.
    """
    runs = [(one, other) for (_, one), (_, other) in zip(dense.answered, ours.answered, strict=True)]
    pairs = [pair for one, other in runs for pair in zip(one.results[1:], other.results[1:], strict=True)]
    finals = [(ours.workload.final(one.text), ours.workload.final(other.text)) for one, other in runs]
    agents = []
    for agent in (AgentId(one.id) for one in ours.workload.agents):
        densely, translated = dense.figures(agent), ours.figures(agent)
        agents.append(
            {
                "agent": agent,
                "ttft_dense_ms": densely["ttft_ms"],
                "ttft_dense_p90_ms": densely["ttft_p90_ms"],
                "ttft_translated_ms": translated["ttft_ms"],
                "ttft_translated_p90_ms": translated["ttft_p90_ms"],
                "accuracy_dense": densely["accuracy"],
                "accuracy_translated": translated["accuracy"],
                "reuse_rate": translated["reuse_rate"],
                "tokens": translated["tokens"],
            }
        )
    whole = ours.figures()
    return {
        "agents": agents,
        "accuracy_dense": agents[-1]["accuracy_dense"],
        "accuracy_translated": agents[-1]["accuracy_translated"],
        "same_final_answer": sum(one == other and one is not None for one, other in finals) / len(finals),
        "same_answers": sum(one.text == other.text for one, other in pairs) / max(1, len(pairs)),
        **{name: whole[name] for name in ("ttft_ms", "reuse_rate", "tokens")},
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


def answer(
    engine: Engine,
    workload: Team,
    asked: Iterable[Question],
    reuse: ReuseMode,
    on_question: Callable[[TeamScore], None] = lambda _: None,
) -> TeamScore:
    """Answer all questions one after the other.

    Each question waits until the engine is idle, so that its TTFT includes no learning from the one before; the agents
    of one question follow each other without a pause.
    """
    flow, score = workload.workflow(), TeamScore(workload)
    for question in asked:
        engine.wait_idle()
        result = run(engine, flow, {QUESTION: question.text}, reuse=reuse, on_tool_error="text")
        score.answered.append((question, result))
        on_question(score)
    return score
