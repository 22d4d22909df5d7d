"""Runs what needs a GPU, stage by stage, most telling first, and goes on where the last call stopped.

    PYTHONPATH=src python -m scripts.gpu.check --out gpu-results --seconds 560

Every stage writes a file of its name to --out, after each of its steps, and `summary.json` has them all at a glance.
What a call finds done for the same sources it leaves out, passed or failed (`--retry` runs again what failed). A step
that would not fit into what is left of --seconds ends the call. Exit status: 0, or 1 where a step has failed, 2 where
Python packages or the GPU are missing.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.gpu.environment import remedy
from scripts.gpu.perform import perform
from scripts.gpu.record import ROOT, Record, commit, version, write
from scripts.gpu.stages import Stage, Step, stages

SPARE = 10.0
"""Seconds of a call that no step gets"""
DONE = ("complete", "failed")


class Call:
    """One call: it runs the remaining stages as far as its time allows."""

    def __init__(self, out: Path, chosen: Sequence[Stage], device: str, seconds: float, *, retry: bool = False) -> None:
        self._out, self._end, self._retry = out, time.monotonic() + seconds - SPARE, retry
        self._stages, self._device, self._sources = chosen, device, version()
        self._records = {stage.name: Record(out, stage, self._sources, device) for stage in chosen}

    def run(self, only: str | None = None) -> None:
        """Run the remaining steps, of one stage or of all, until one does not fit the time."""
        for stage in (stage for stage in self._stages if only in (None, stage.name)):
            for step in stage.steps:
                if not self._step(stage, step):
                    return

    def _step(self, stage: Stage, step: Step) -> bool:
        """Run a step that is not done. Returns False if the call ends with it."""
        record = self._records[stage.name]
        state = record.state_of(step)
        if state in DONE and not (self._retry and state == "failed"):
            return True
        left = self._end - time.monotonic()
        if left < step.least:
            print(f"{stage.name} {step.name}: needs {step.least:.0f} s, left for the next call", flush=True)
            return False
        record.put(step, result := perform(step, self._out, min(step.limit, left)))
        print(f"{stage.name} {step.name}: {result['state']} (rc {result['rc']}, {result['seconds']} s)", flush=True)
        if result["state"] == "failed":
            print("\n".join(result["log_tail"][-25:]), flush=True)
        return result["state"] != "partial"

    def summary(self, environment: dict[str, Any]) -> dict[str, Any]:
        """Return a summary of all stages."""
        briefs = {name: record.brief() for name, record in self._records.items()}
        return {
            "version": self._sources,
            "commit": commit(),
            "device": self._device,
            "environment": environment,
            "stages": briefs,
            "failed": [name for name, brief in briefs.items() if brief["state"] == "failed"],
            "left": [name for name, brief in briefs.items() if brief["state"] in ("left", "partial")],
        }


def look_around(device: str) -> dict[str, Any]:
    """Return the environment, read by a short-lived process, since looking at a GPU takes some of its memory."""
    command = [sys.executable, "-m", "scripts.gpu.environment", device]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(answer.stdout.splitlines()[-1])


def lack(environment: dict[str, Any], device: str) -> str | None:
    """Return what this machine lacks, as text; None if nothing."""
    if environment["missing"]:
        return remedy(environment["missing"])
    if device == "cuda" and environment["gpu"] is None:
        return "torch finds no CUDA device; --device cpu runs the tiny forms of the stages\n"
    return None


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="the folder of the results")
    parser.add_argument("--only", metavar="STAGE", help="this stage alone")
    parser.add_argument("--list", action="store_true", help="name the stages and end")
    parser.add_argument("--seconds", type=float, default=560.0, help="how long this call may take")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: the tiny forms of the stages")
    parser.add_argument("--retry", action="store_true", help="run again what failed")
    return parser


def main() -> int:
    """Run a call. Returns its exit status."""
    parser = arguments()
    args = parser.parse_args()
    names = [stage.name for stage in stages(args.device)]
    if args.list:
        print("\n".join(f"{stage.name:8} {stage.about}" for stage in stages(args.device)))
        return 0
    if args.only not in (None, *names):
        parser.error(f"--only {args.only}: stages are {', '.join(names)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args.out.mkdir(parents=True, exist_ok=True)
    return check(args)


def check(args: argparse.Namespace) -> int:
    """Check the environment, run the remaining steps and write the summary. Returns the exit status."""
    call = Call(args.out.resolve(), stages(args.device), args.device, args.seconds, retry=args.retry)
    environment = look_around(args.device)
    lacking = lack(environment, args.device)
    try:
        if lacking is None:
            call.run(args.only)
    finally:
        summary = call.summary(environment)
        write(args.out / "summary.json", summary)
    print(json.dumps({key: summary[key] for key in ("stages", "failed", "left")}, indent=1))
    if lacking is not None:
        print(lacking, end="")
        return 2
    return 1 if summary["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
