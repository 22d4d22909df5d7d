"""Model Runner V2, and lanes on two tensor-parallel ranks with holes of their own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kedge.integrations.vllm.plugin.settings import SCHEDULER
from tests.integrations.vllm.conftest import Answers, driver, receipt
from tests.integrations.vllm.lane_prompts import HOLES, SETTINGS, ask, teach
from tests.marks import on_push

HERE = Path(__file__).parent
ON_V2 = {
    "forced answers": ("forced_answers", "beside", 4),
    "lanes over KV": ("lanes_over_kv", "llama and (planner or busy)", 6),
    "lanes": ("lanes lanes_in_small_steps", "(abort and 2) or preempted or failed or crowds", 9),
}
"""Files, which of their tests are run, and how many these are: each of them in both schedulings"""


@pytest.mark.parametrize("case", on_push(ON_V2, ["forced answers"]))
def test_model_runner_v2_does_the_same(case: str) -> None:
    """Its kernels run on Triton's interpreter, which has to be chosen before vLLM is imported."""
    names, chosen, count = ON_V2[case]
    files = [str(HERE / f"test_{name}.py") for name in names.split()]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:logging", *files, "-k", chosen],
        env={**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "1"},
        cwd=HERE.parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"{count} passed" in done.stdout


def test_two_ranks_compute_the_same_holes(tiny_llama: Path, stock_answers: Answers) -> None:
    """The lanes reach the workers in other processes, and each fills the holes of its own heads."""
    parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with driver(tiny_llama, extra=SETTINGS, scheduler_cls=SCHEDULER, **parallel) as engine:
        teach(engine)
        steps, schedule = [], engine.scheduler.schedule

        def watched(*args: Any, **more: Any) -> Any:
            steps.append(schedule(*args, **more))
            return steps[-1]

        engine.scheduler.schedule = watched
        output = ask(engine, 0)
        assert not engine.side.requests
    lanes = [count for step in steps for one, count in step.num_scheduled_tokens.items() if one.startswith("lane-")]
    assert lanes == [len(hole) for hole in HOLES[:-1]]
    assert receipt(output)["tokens"] == {"device": 0, "host": 0, "translated": 291, "computed": 9}
    assert list(output.outputs[0].token_ids) == stock_answers[0][:12]
