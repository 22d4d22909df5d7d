"""The examples of `docs/kvflow.md` run, and say what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kedge.types import AgentId, Namespace, RunId, TenantId
from kedge.workflow.export import lanes
from kedge.workflow.forecast import AgentKey
from kedge.workflow.spec import build_step_graph
from kedge.workflow.steps import UNKNOWN

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "kvflow.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
YAML = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_steps_of_a_workflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    exec(PYTHON[0], names)
    steps = names["graph"].steps(running={"analyst"}, done={"solver"})
    assert steps == {"solver": UNKNOWN, "analyst": 0, "programmer": 1, "inspector": 2, "final": 3}


def test_python_and_yaml_say_the_same() -> None:
    names: dict[str, Any] = {}
    exec(PYTHON[1], names)
    assert build_step_graph(yaml.safe_load(YAML[0])) == names["graph"]


def test_the_lanes_that_inspect_draws() -> None:
    drawn = [[node.id for node in lane] for lane in lanes(build_step_graph(yaml.safe_load(YAML[0])))]
    assert " → ".join(f"[{' | '.join(lane)}]" for lane in drawn) in PAGE.splitlines()


def test_following_a_run() -> None:
    names: dict[str, Any] = {}
    exec(PYTHON[1] + PYTHON[2], names)
    assert names["changes"][AgentKey(Namespace(TenantId("tenant")), "client", RunId("run-1"), AgentId("searcher"))] == (
        0,
        1.0,
    )
    assert names["board"].steps == {}
