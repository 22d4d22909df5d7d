"""Runs one step of a stage in a process of its own, for a limited time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.gpu.record import ROOT
from scripts.gpu.stages import Step

TIMED_OUT = 124
"""Exit status of a step that was ended at its limit"""
TAIL = 60
"""Lines of a step's output that are kept"""


def perform(step: Step, out: Path, seconds: float) -> dict[str, Any]:
    """Run a step for at most `seconds`. Returns how it ended, and its results."""
    with tempfile.TemporaryDirectory() as scratch:
        log, began = Path(scratch) / "log", time.monotonic()
        names = {"out": out, "results": Path(scratch) / "results"}
        status = _run([_filled(argument, names) for argument in step.arguments], log, seconds)
        spent = time.monotonic() - began
        results, error = _read(step, names["results"])
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
    state = _state(step, status, results, cut=seconds < step.limit)
    kept = {"state": state, "rc": status, "seconds": round(spent, 1), "results": results}
    return {**kept, **({"unread": error} if error else {}), "log_tail": lines}


def _filled(argument: str, names: dict[str, Any]) -> str:
    for name, value in names.items():
        argument = argument.replace(f"{{{name}}}", str(value))
    return argument


def _run(arguments: list[str], log: Path, seconds: float) -> int:
    """Run a process to its end. Returns its exit status, or `TIMED_OUT` if it and its children had to be killed."""
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, *arguments]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=env, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return TIMED_OUT
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _read(step: Step, file: Path) -> tuple[Any, str | None]:
    """Return the results, or the reason why there are none. A file that a killed step left half written is no error."""
    if not file.is_file():
        return None, "it wrote no results"
    try:
        return step.read(file), None
    except (ValueError, KeyError, SyntaxError) as error:  # a broken XML is a SyntaxError
        return None, f"its results cannot be read: {error!r}"


def _state(step: Step, status: int, results: Any, *, cut: bool) -> str:
    """Return the state of a step that has ended; `cut` if it got less time than its limit."""
    if status == TIMED_OUT and cut:
        return "partial"
    if status not in step.accepted or (results is None and status == 0):
        return "failed"
    return "complete"
