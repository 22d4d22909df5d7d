"""mkdocs hooks: examples are part of the site, and links to them work there as they do in the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\]\(((?:\.\./)+)(examples/[^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the examples."""
    for path in sorted((ROOT / "examples").glob("*.*")):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links that leave `docs/` lose the one step up that the site does not have."""
    depth = page.file.src_uri.count("/")
    return OUTSIDE.sub(lambda link: f"]({'../' * depth}{link[2]})", markdown)
