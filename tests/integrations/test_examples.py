"""The example applications run, and the one for LangGraph differs in two lines from one without Kedge."""

import difflib
import re
import runpy
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from kedge.engine.local.engine import LocalEngine
from kedge.settings import DiscoveryMode, EngineSettings
from kedge.workloads.miniature import questions
from tests.integrations.conftest import ReceivedHints
from tests.server.conftest import serving, wait_until

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


def unchanged(folder: Path) -> Path:
    """The example for LangGraph without Kedge, in which two lines are others."""
    source = (EXAMPLES / "langgraph_team.py").read_text(encoding="utf-8")
    plain = re.sub(r"^.*# Kedge: was `(.*)`$", r"\1", source, flags=re.MULTILINE)
    changes = [line for line in difflib.ndiff(plain.splitlines(), source.splitlines()) if line.startswith("+ ")]
    assert len(changes) == 2
    (folder / "plain.py").write_text(plain, encoding="utf-8")
    return folder / "plain.py"


def test_the_langgraph_example_without_kedge_sends_no_hints(
    received: ReceivedHints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(unchanged(tmp_path), received, monkeypatch)
    assert len(received.all) >= 9 and not received.calls


def answered(file: Path, mode: DiscoveryMode) -> dict[str, float]:
    """Let the example's team answer questions rightly with the bundled model; its prompt tokens by their source."""
    config = EngineSettings(planner={"by_cost": False}, guard={"mode": "off"}, discovery={"mode": mode})
    with LocalEngine(config=config) as engine, serving(engine) as server, server.http() as http:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sys, "argv", [file.name, server.url])
            graph = runpy.run_path(str(file))["graph"]
        for question in islice(questions(0), 9):
            engine.wait_idle()
            answers = graph.invoke({"question": question.text, "answers": []})["answers"]
            assert answers[-1] == ("FinalRefer", f"The answer is {question.answer}.")
        lines = http.get("/metrics").text
    counted = re.findall(r'^kedge:prompt_tokens_by_source_total{.*source="(\w+)".*} (\S+)$', lines, re.MULTILINE)
    return {source: float(count) for source, count in counted}


def test_an_unchanged_graph_is_translated_and_answers_as_without(tmp_path: Path) -> None:
    """So is the one with the adapter's hints. How much is learned in time depends on the machine."""
    plain, own = unchanged(tmp_path), EXAMPLES / "langgraph_team.py"
    stock, found = answered(plain, DiscoveryMode.OFF), answered(plain, DiscoveryMode.TRANSLATE)
    hinted = answered(own, DiscoveryMode.TRANSLATE)
    assert min(hinted["translated"], found["translated"]) > 0 == stock.get("translated", 0)
    assert max(hinted["computed"], found["computed"]) < stock["computed"]


@pytest.mark.parametrize(("module", "package"), PACKAGES.items())
def test_a_missing_package_names_the_extra(module: str, package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; import kedge.integrations.{module}"
    found = subprocess.run([sys.executable, "-c", code], check=False, timeout=60, capture_output=True, text=True)
    assert "kedge.errors.ConfigError" in found.stderr and "pip install 'kedge[" in found.stderr


def test_the_package_itself_needs_no_extra() -> None:
    code = "import sys, kedge.integrations.follower; sys.exit(bool({'openai', 'torch', 'langgraph'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
