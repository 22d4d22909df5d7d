"""The documentation site builds without a warning, and every link and image on its pages leads somewhere."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("zensical", reason="needs the extra docs: pip install 'kedge[docs]'")
ROOT = Path(__file__).parents[1]
ELSEWHERE = re.compile(r"[a-z]+:|//")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built by what `make docs` calls from a copy of the pages."""
    project = tmp_path_factory.mktemp("project")
    shutil.copy(ROOT / "mkdocs.yml", project)
    shutil.copytree(ROOT / "docs", project / "docs")
    for folder in ("src", "examples", "deploy"):
        (project / folder).symlink_to(ROOT / folder)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    built = subprocess.run(command, cwd=project, check=False, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    return project / "build" / "site"


def broken(site: Path) -> Iterator[str]:
    """Yield the links and images that lead to no file of the site, or to no heading of its pages."""
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html") if page.name != "404.html"}
    for page, text in pages.items():
        for target in re.findall(r'(?:href|src)="([^"]*)"', text):
            if not ELSEWHERE.match(target) and not leads_somewhere(page, target, pages):
                yield f"{page.relative_to(site)}: {target}"


def leads_somewhere(page: Path, target: str, pages: dict[Path, str]) -> bool:
    path, _, heading = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    file = file / "index.html" if file.is_dir() else file
    return file.is_file() and (not heading or f'id="{heading}"' in pages[file])


def test_every_link_and_image_of_the_site_leads_somewhere(site: Path) -> None:
    assert not [*broken(site)]


def test_a_link_that_leads_nowhere_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<a href="gone/">x</a> <a href="#no">y</a> <h1 id="a"></h1><a href="#a">z</a>')
    assert [*broken(tmp_path)] == ["index.html: gone/", "index.html: #no"]


def test_the_reference_is_made_from_the_code(site: Path) -> None:
    page = (site / "reference" / "python" / "index.html").read_text(encoding="utf-8")
    assert "LocalEngine" in page and ":::" not in page


def test_the_examples_are_on_their_page(site: Path) -> None:
    page = (site / "examples" / "index.html").read_text(encoding="utf-8")
    text = html.unescape(re.sub(r"<[^>]+>", "", page))
    for file in [*(ROOT / "examples").glob("*.py"), *(ROOT / "examples").glob("*.yaml")]:
        assert f'id="{file.stem}"' in page
        assert file.read_text(encoding="utf-8").splitlines()[0] in text
