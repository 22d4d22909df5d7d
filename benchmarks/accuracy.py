"""Teams that answer by themselves, by each method in turn: right answers, cost and speed (KVCOMM, Table 1).

Pools fill as they do in use. `kedge bench fidelity` compares answers that are forced to those of dense prefill.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kedge.bench.demo import TeamScore, answer, compared, team
from kedge.bench.probe import method_named
from kedge.bench.shapes import load_model, to_compare
from kedge.errors import ConfigError

METHODS = ("epic", "kvcomm", "token", "kedge", "served")
DENSE = "dense"


@dataclass(frozen=True)
class AccuracySettings:
    """What is asked of whom."""

    model: Path
    task: str = "reading"
    agents: int | None = None
    """So many of the team: the first ones, and the last, which decides; None: all"""
    questions: int = 50
    methods: tuple[str, ...] = METHODS
    """Beside dense prefill"""
    seed: int = 0


def measure(settings: AccuracySettings, progress: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """Return a row for dense prefill and for every method. Raises `ConfigError` for an unknown task or method, or a
    number of agents that the team does not have.
    """
    workload, asked = team(settings.task, settings.questions, settings.seed)
    methods = {name: method_named(name) for name in dict.fromkeys((DENSE, *settings.methods))}
    if settings.agents is not None:
        if not 2 <= settings.agents <= len(workload.agents):
            raise ConfigError("agents", settings.agents, f"{workload.name} has 2 to {len(workload.agents)}")
        workload = replace(workload, agents=(*workload.agents[: settings.agents - 1], workload.agents[-1]))
    progress("loading the model")
    loaded = load_model(settings.model, to_compare())
    scores: dict[str, TeamScore] = {}
    for name, method in methods.items():
        with method.open(loaded) as engine:

            def note(score: TeamScore, name: str = name) -> None:
                progress(f"{name}: {len(score.answered)} of {len(asked)} questions")

            scores[name] = answer(engine, workload, asked, method.reuse, note)
    return [row(name, compared(scores[DENSE], score)) for name, score in scores.items()]


def row(name: str, figures: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a method; its times are the median over all calls."""
    tokens = figures["tokens"]
    return {
        "method": name,
        "right": figures["accuracy_translated"],
        "same_final_answer": figures["same_final_answer"],
        "same_answers": figures["same_answers"],
        "calls_translated": figures["reuse_rate"],
        "computed": tokens["computed"] / sum(tokens.values()),
        "ttft_ms": figures["ttft_ms"],
    }
