"""How well the bundled model's teams answer on vLLM with the plug-in and on the embedded engine (KVCOMM, Table 1).

Each team answers all questions by itself, with translated KV and by dense prefill: every agent reads the real answers
of the agents before it. Pools fill from empty. Both engines translate whatever it costs, and without a guard, so that
they are compared by what they translate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.lab.methods import method_named, open_engine
from kedge.bench.demo import AgentScore, Comparison, TeamScore, answer, questions
from kedge.bench.shapes import load_model
from kedge.engine.base import Engine
from kedge.integrations.vllm.engine.engine import VLLMEngine
from kedge.settings import EngineSettings
from kedge.types import ReuseMode
from kedge.workloads.miniature import TASKS, Task

METHOD = "token"
"""The embedded engine's method, with Kedge's defaults."""
ARGUMENTS = {
    "max_model_len": 2048, "num_gpu_blocks_override": 512, "max_num_seqs": 64,
}  # fmt: skip
"""vLLM's: room for a team, and rows for the parts of a prompt that are computed side by side."""
COMPARED: Mapping[str, Any] = {"planner": {"by_cost": False}, "guard": {"mode": "off"}}
"""What vLLM has in common with the lab's engines."""
SETTLE_S = 300.0
"""Seconds after which base prefills count as stuck."""
Progress = Callable[[str], None]
Scores = Mapping[str, Comparison]
"""Task -> both modes' scores."""


@dataclass(frozen=True)
class AccuracySettings:
    """The teams and the number of questions for each."""

    questions: int = 50
    tasks: Sequence[str] = tuple(TASKS)
    seed: int = 0


QUICK_ACCURACY = AccuracySettings(questions=4)
"""Fewer questions."""


@dataclass(frozen=True)
class AccuracyResult:
    """All scores by engine."""

    engines: Mapping[str, Scores]

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        return {
            engine: {task: comparison_json(one) for task, one in found.items()}
            for engine, found in self.engines.items()
        }


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Return a team's figures: shares of right answers, and the calls and prompt tokens of the translated mode."""
    dense, translated = comparison.dense.agents, comparison.translated.agents
    return {
        "agents": [
            {"agent": name, "accuracy_dense": dense[name].accuracy, "accuracy_translated": score.accuracy}
            for name, score in translated.items()
        ],
        "same_final_answer": comparison.same_final_answer,
        "calls": _total(comparison.translated, lambda score: score.calls),
        "translated_calls": _total(comparison.translated, lambda score: score.translated_calls),
        "tokens": comparison.translated.tokens(),
    }


def _total(score: TeamScore, count: Callable[[AgentScore], int]) -> int:
    return sum(map(count, score.agents.values()))


def measure_accuracy(settings: AccuracySettings, progress: Progress) -> AccuracyResult:
    """Let all teams answer on vLLM, then on the embedded engine. Raises `ConfigError`."""
    return AccuracyResult({"vllm": _on_vllm(settings, progress), "embedded": _embedded(settings, progress)})


def _on_vllm(settings: AccuracySettings, progress: Progress) -> Scores:
    progress("accuracy: starting vLLM")
    with VLLMEngine(config=EngineSettings(backend="vllm", **COMPARED, vllm=ARGUMENTS)) as engine:
        return scores(engine, lambda: settle(engine), settings, lambda what: progress(f"accuracy: vLLM, {what}"))


def _embedded(settings: AccuracySettings, progress: Progress) -> Scores:
    with open_engine(method_named(METHOD), load_model(None, EngineSettings())) as engine:
        return scores(engine, engine.wait_idle, settings, lambda what: progress(f"accuracy: embedded, {what}"))


def scores(engine: Engine, settle: Callable[[], object], settings: AccuracySettings, progress: Progress) -> Scores:
    """Return both modes' scores by task.

    Dense prefill comes second: vLLM caches what it computes, and the same prompts would then be found in its prefix
    cache, with nothing left to translate.
    """
    return {name: _compared(engine, settle, TASKS[name], settings, progress) for name in settings.tasks}


def _compared(
    engine: Engine, settle: Callable[[], object], task: Task, settings: AccuracySettings, progress: Progress
) -> Comparison:
    asked = questions(task, settings.questions, settings.seed)

    def answered(reuse: ReuseMode) -> TeamScore:
        def note(score: TeamScore) -> None:
            progress(f"{task.name}, {reuse.value}: {len(score.finals)} of {settings.questions} questions")

        return answer(engine, task, asked, reuse, settle, note)

    translated = answered(ReuseMode.TRANSLATE)
    return Comparison(answered(ReuseMode.OFF), translated)


def settle(engine: VLLMEngine, seconds: float = SETTLE_S) -> None:
    """Wait until no base prefill is left. Raises `TimeoutError` after so many seconds."""
    deadline = time.monotonic() + seconds
    while base_prefills(engine):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{base_prefills(engine)} base prefills are left after {seconds:g} s")
        time.sleep(0.01)


def base_prefills(engine: VLLMEngine) -> int:
    """Return the number of base prefills that are waiting or running."""
    figures: Any = engine.inspect()
    return int(figures["requests"]["base_prefills"])
