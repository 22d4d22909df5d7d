"""The results of each stage in a file, by which calls of `scripts/gpu_check.sh` continue each other."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from scripts.gpu.stages import Stage, Step

ROOT = Path(__file__).parents[2]
SOURCES = ("src", "scripts", "tests")


def version() -> str:
    """Return the digest of all sources that the results belong to."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(file.relative_to(ROOT).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def commit() -> str | None:
    """Return the commit, where this is a repository."""
    asked = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    if shutil.which("git") is None:
        return None
    answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None


class Record:
    """The results of one stage, in a file that is written atomically."""

    def __init__(self, out: Path, stage: Stage, sources: str, device: str) -> None:
        self._file, self._stage = out / f"{stage.name}.json", stage
        fresh = {"stage": stage.name, "about": stage.about, "version": sources, "device": device, "steps": {}}
        self.data = self._saved(fresh) or fresh

    def _saved(self, fresh: dict[str, Any]) -> dict[str, Any] | None:
        """Return the file's content if it is of the same sources and device."""
        if not self._file.is_file():
            return None
        try:
            data = json.loads(self._file.read_text(encoding="utf-8"))
        except ValueError:
            return None
        same = isinstance(data, dict) and all(data.get(key) == fresh[key] for key in ("stage", "version", "device"))
        return data if same else None

    def state_of(self, step: Step) -> str:
        """Return how a step ended: `complete`, `failed`, `partial`, or `left` where it has not been run."""
        return self.data["steps"].get(step.name, {}).get("state", "left")

    def put(self, step: Step, result: dict[str, Any]) -> None:
        """Record the result of a step."""
        self.data["steps"][step.name] = result
        self.data["state"] = self.state
        write(self._file, self.data)

    @property
    def state(self) -> str:
        """The stage's state: the worst of its steps'."""
        found = {self.state_of(step) for step in self._stage.steps}
        if "failed" in found:
            return "failed"
        return found.pop() if len(found) == 1 else "partial"

    def brief(self) -> dict[str, Any]:
        """Return the states of the stage and of its steps."""
        return {"state": self.state, "steps": {step.name: self.state_of(step) for step in self._stage.steps}}


def write(file: Path, data: dict[str, Any]) -> None:
    """Write JSON atomically: if interrupted, the file keeps its earlier content."""
    partial = file.with_name(f"{file.name}.part")
    partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    partial.replace(file)
