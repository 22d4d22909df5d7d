"""The import graph sees relative and lazy imports, follows names to their modules, and finds circles and floors."""

from pathlib import Path

import pytest

from scripts.import_graph import ImportGraph, circular, floors

FILES = {
    "__init__.py": "",
    "ground.py": "import json\n",
    "cache/__init__.py": "from house.cache.tree import Tree\n",
    "cache/tree.py": "from ..ground import size\nfrom . import nodes\n",
    "cache/nodes.py": "def load():\n    from house.cache import tree\n",
    "engine/run.py": "from house import ground\nif ground.CHECKING:\n    from house.cache import Tree\n",
}


@pytest.fixture
def graph(tmp_path: Path) -> ImportGraph:
    for name, text in FILES.items():
        file = tmp_path / "house" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return ImportGraph(tmp_path / "house")


def test_imports_are_read_wherever_they_stand(graph: ImportGraph) -> None:
    assert graph.names(("house", "ground")) == {("json",)}
    assert graph.names(("house", "cache", "tree")) == {("house", "ground", "size"), ("house", "cache", "nodes")}
    assert graph.names(("house", "cache", "nodes")) == {("house", "cache", "tree")}
    assert ("house", "cache", "Tree") in graph.names(("house", "engine", "run"))


def test_a_name_leads_to_its_module(graph: ImportGraph) -> None:
    assert graph.imported(("house", "cache", "tree")) == {("house", "ground"), ("house", "cache", "nodes")}
    assert graph.imported(("house", "engine", "run")) == {("house", "cache"), ("house", "ground")}


def test_a_circle_is_found_and_shares_a_floor(graph: ImportGraph) -> None:
    arrows = graph.siblings(("house", "cache"))
    assert circular(arrows) == {("tree", "nodes"), ("nodes", "tree")}
    assert floors(arrows) == {"tree": 1, "nodes": 1}
