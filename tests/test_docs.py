"""The README's examples run, and what the pages link to is there."""

import html
import pkgutil
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

import kedge
from kedge.engine.local.engine import LocalEngine
from kedge.settings import EngineSettings, GuardSettings, Settings
from kedge.workflow.spec import load_workflow
from scripts import matrix
from tests.real import RealModel

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
README = PAGES[0].read_text(encoding="utf-8")
SETTINGS = DOCS / "reference" / "settings.md"


def block(language: str, page: Path = PAGES[0]) -> str:
    """The first code block of this language on a page."""
    found = re.search(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


def test_the_python_example_prints_lines_as_the_readme_shows(
    smollm2: RealModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its texts depend on the CPU, which computes in 16 bits or in 32. The first question has to do: the proof takes
    about ten, as the last line shows.
    """
    settings = EngineSettings(guard=GuardSettings(fidelity=0.002))
    monkeypatch.setattr(kedge, "LocalEngine", lambda *_: LocalEngine(smollm2.path, settings))
    exec(block("python").replace("[:14]", "[:1]"), {})
    line = re.compile(r"^(\d+) exact, (\d+) translated, (\d+) computed: ['\"].+['\"]$", re.MULTILINE)
    printed, shown = line.findall(capsys.readouterr().out), line.findall(README)
    assert len(printed) == 1 and len(shown) == 3
    for exact, translated, computed in (*printed, *shown[:2]):
        assert not int(translated) and int(computed) > int(exact)
    assert int(shown[-1][1]) > int(shown[-1][0]) + int(shown[-1][2])


def test_the_first_workflow_is_one(tmp_path: Path) -> None:
    file = tmp_path / "review.yaml"
    file.write_text(block("yaml", DOCS / "guides" / "first-workflow.md"), encoding="utf-8")
    flow = load_workflow(file)
    assert flow.order and flow.inputs == ("user_question",)


def test_the_settings_example_is_right(tmp_path: Path) -> None:
    file = tmp_path / "kedge.toml"
    file.write_text(block("toml", SETTINGS), encoding="utf-8")
    assert Settings.load(file).engine.kv_memory == 2 << 30


@pytest.mark.parametrize("name", re.findall(r"KEDGE_\w+", SETTINGS.read_text(encoding="utf-8")))
def test_the_variables_of_the_settings_example_exist(name: str) -> None:
    attrgetter(name.removeprefix("KEDGE_").lower().replace("__", "."))(Settings())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_can_be_read_in_a_quarter_of_an_hour_and_its_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.split()) <= 3000
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_files_of_results_that_the_pages_name_exist() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "results").rglob("*.md"))
    named = set(re.findall(r"`([a-z][a-z0-9.-]*\.json)`", pages))
    assert len(named) > 20
    assert not [name for name in named if not (ROOT / "benchmarks" / "results" / name).is_file()]


# the site -------------------------------------------------------------------------------------------------------------


def test_the_page_of_commands_is_what_the_commands_say() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "cli_reference.py"))
    assert made["PAGE"].read_text(encoding="utf-8") == made["reference"](), "run scripts/cli_reference.py"


def test_the_page_of_versions_is_what_the_results_say() -> None:
    page = matrix.PAGE.read_text(encoding="utf-8")
    assert matrix.written(page, matrix.load()) == page


def nav(entries: object) -> Iterator[str]:
    """The pages of a part of the navigation."""
    if isinstance(entries, str):
        yield entries
    for entry in entries.values() if isinstance(entries, dict) else entries if isinstance(entries, list) else ():
        yield from nav(entry)


def test_the_site_has_every_page() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").replace("!!python/name:", "")
    listed = list(nav(yaml.safe_load(text)["nav"]))
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize("name", re.findall(r"^::: (\S+)$", "".join(map(Path.read_text, PAGES)), re.MULTILINE))
def test_what_the_reference_names_exists_and_says_what_it_is(name: str) -> None:
    assert pkgutil.resolve_name(name).__doc__


def test_members_that_the_reference_lists_say_what_they_are() -> None:
    page = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
    listed = r"^::: (\S+)\n    options:\n(?:      \w+: \w+\n)*      members: \[(.*)\]"
    for name, members in re.findall(listed, page, re.MULTILINE):
        owner = pkgutil.resolve_name(name)
        assert not [member for member in members.split(", ") if not getattr(owner, member).__doc__]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built by what `make docs` calls from a copy of the pages; strict, so that links lead somewhere."""
    pytest.importorskip("zensical", reason="needs the extra docs: pip install 'kedge[docs]'")
    project = tmp_path_factory.mktemp("project")
    shutil.copy(ROOT / "mkdocs.yml", project)
    shutil.copytree(ROOT / "docs", project / "docs")
    for folder in ("src", "examples", "deploy"):
        (project / folder).symlink_to(ROOT / folder)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    built = subprocess.run(command, cwd=project, check=False, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    return project / "build" / "site"


def test_the_reference_is_made_from_the_code(site: Path) -> None:
    page = (site / "reference" / "python" / "index.html").read_text(encoding="utf-8")
    assert "LocalEngine" in page and ":::" not in page


def test_the_examples_are_on_their_page(site: Path) -> None:
    page = (site / "examples" / "index.html").read_text(encoding="utf-8")
    text = html.unescape(re.sub(r"<[^>]+>", "", page))
    for file in [*(ROOT / "examples").glob("*.py"), *(ROOT / "examples").glob("*.yaml")]:
        assert f'id="{file.stem}"' in page
        assert file.read_text(encoding="utf-8").splitlines()[0] in text
