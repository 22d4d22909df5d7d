"""The example applications run, and the one for LangGraph differs in two lines from one without Kedge."""

from __future__ import annotations

import difflib
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.conftest import ReceivedHints
from tests.server.conftest import wait_until

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PACKAGES = {"langgraph": "langgraph", "openai_agents": "agents", "openai_client": "openai"}


def run(file: Path, received: ReceivedHints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [file.name, received.served.url])
    runpy.run_path(str(file), run_name="__main__")


@pytest.mark.parametrize(
    ("name", "agents", "runs"),
    [
        ("langgraph_team", {"solver", "analyst", "final"}, 3),
        ("openai_client_team", {"solver", "final"}, 2),
        ("openai_agents_team", {"Math Solver", "Mathematical Analyst", "FinalRefer"}, 2),
    ],
)
def test_every_call_is_received(
    name: str, agents: set[str], runs: int, received: ReceivedHints, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(EXAMPLES / f"{name}.py", received, monkeypatch)
    assert {*received.agents} == agents
    assert all(hints.steps and {*hints.steps} == agents for hints in received.calls)
    assert len({hints.run for hints in received.calls}) == runs
    wait_until(lambda: sum(hints.final for hints in received.all) == runs)


def test_the_langgraph_example_differs_from_a_plain_one_in_two_lines(
    received: ReceivedHints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = (EXAMPLES / "langgraph_team.py").read_text(encoding="utf-8")
    plain = re.sub(r"^.*# Kedge: was `(.*)`$", r"\1", source, flags=re.MULTILINE)
    changes = [line for line in difflib.ndiff(plain.splitlines(), source.splitlines()) if line.startswith("+ ")]
    assert len(changes) == 2
    (tmp_path / "plain.py").write_text(plain, encoding="utf-8")
    run(tmp_path / "plain.py", received, monkeypatch)
    assert len(received.all) >= 9 and not received.calls


@pytest.mark.parametrize(("module", "package"), PACKAGES.items())
def test_a_missing_package_names_the_extra(module: str, package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; import kedge.integrations.{module}"
    found = subprocess.run([sys.executable, "-c", code], check=False, timeout=60, capture_output=True, text=True)
    assert "kedge.errors.ConfigError" in found.stderr and "pip install 'kedge[" in found.stderr


def test_the_package_itself_needs_no_extra() -> None:
    code = "import sys, kedge.integrations.follower; sys.exit(bool({'openai', 'torch', 'langgraph'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
