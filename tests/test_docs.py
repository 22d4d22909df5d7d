"""The README's examples run, and what the pages link to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kedge
from kedge.config import Settings
from kedge.engine.echo import EchoEngine
from kedge.workflow.spec import load_workflow

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = PAGES[0].read_text(encoding="utf-8")


def block(language: str) -> str:
    """The first code block of this language in the README."""
    found = re.search(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


def test_the_python_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kedge, "LocalEngine", lambda _: EchoEngine({"solver": "eight", "judge": "it is eight"}))
    exec(block("python"), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "it is eight"
    assert [line.split()[0] for line in lines[1:]] == ["solver", "judge"]


def test_the_yaml_example_is_a_workflow(tmp_path: Path) -> None:
    file = tmp_path / "team.yaml"
    file.write_text(block("yaml"), encoding="utf-8")
    assert load_workflow(file).order == ("solver", "programmer", "judge")


def test_the_settings_example_is_right(tmp_path: Path) -> None:
    file = tmp_path / "kedge.toml"
    file.write_text(block("toml"), encoding="utf-8")
    assert Settings.load(file).engine.kv_memory == 2 << 30


@pytest.mark.parametrize("name", re.findall(r"KEDGE_\w+", block("toml")))
def test_the_variables_of_the_settings_example_exist(name: str) -> None:
    section: object = Settings()
    for part in name.removeprefix("KEDGE_").lower().split("__"):
        section = getattr(section, part)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing
