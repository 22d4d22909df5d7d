"""The drawing of the rooms: highest floor first, one line each, and only between the markers of the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.import_graph import ImportGraph
from scripts.rooms import BEGIN, END, cut, drawing, drawn

FILES = {
    "__init__.py": "",
    "cli/__init__.py": '"""The command. It has\nmany options."""\nfrom house import anchors, cache\n',
    "cli/run.py": "",
    "cache.py": '"""Where KV lives: blocks,\nand a tree."""\n',
    "anchors.py": "",
}
DRAWN = """\
 2  cli/        The command
 1  anchors.py
    cache.py    Where KV lives: blocks, and a tree
"""


def test_a_drawing(tmp_path: Path) -> None:
    for name, text in FILES.items():
        file = tmp_path / "house" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert drawing(ImportGraph(tmp_path / "house"), ("house",)) == DRAWN


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Short.", "Short"),
        ("A sentence. And more.", "A sentence"),
        ("It has a list: blocks, trees", "It has a list: blocks…"),
        ("Words without any mark at all", "Words without any mark…"),
    ],
)
def test_a_description_is_cut_between_words(text: str, line: str) -> None:
    assert cut(text, 23) == line


def test_only_what_is_between_the_markers_changes() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert drawn(page, "new\n") == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    with pytest.raises(ValueError, match="needs the lines"):
        drawn("no markers", "new")
