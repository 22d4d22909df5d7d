"""Measure every agent's accuracy on the miniature tasks by dense prefill, on unseen questions.

    python scripts/evaluate_nano.py --questions 100
    python scripts/evaluate_nano.py --model /tmp/nano --tasks math,choice

Each agent reads the real answers of the agents before it. The accuracies are written into the model's training.json.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from kedge.bench.demo import TeamScore, questions
from kedge.engine.local.engine import LocalEngine
from kedge.runner.run import run
from kedge.settings import EngineSettings
from kedge.types import ReuseMode
from kedge.workloads.miniature import TASKS, Task


def score(engine: LocalEngine, task: Task, count: int, seed: int) -> dict[str, float]:
    """Return the accuracy by agent, from twelve concurrent runs."""
    flow = task.workflow()
    total = TeamScore.of(flow)
    ask = partial(run, engine, flow, reuse=ReuseMode.EXACT, on_tool_error="text")
    asked = questions(task, count, seed)
    with ThreadPoolExecutor(12) as pool:
        for question, result in zip(asked, pool.map(ask, [{"user_question": q.text} for q in asked]), strict=True):
            total.add(task, question, result)
    return {agent: round(score.correct / score.calls, 4) for agent, score in total.agents.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("src/kedge/models/nano"))
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=list(TASKS), help="names with commas")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small for two: they would mostly wait for each other
    with LocalEngine(args.model, EngineSettings(device=args.device)) as engine:
        ask = partial(score, engine, count=args.questions, seed=args.seed)
        accuracy = {name: ask(TASKS[name]) for name in args.tasks}
    print(json.dumps(accuracy, indent=1))
    file = args.model / "training.json"
    record = json.loads(file.read_text()) if file.exists() else {}
    record |= {
        "accuracy": accuracy,
        "accuracy_questions": args.questions,
        "accuracy_seed": args.seed,
    }
    file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
