"""The floors of the house, read from the import statements: imports point down, and never in a circle."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "kedge"
FLOORS = (
    ("types", "errors", "settings", "metrics", "hint_values", "checks"),
    ("structures",),
    ("policies", "workflow"),
    ("cache", "kv", "models"),
    ("reuse", "workloads"),
    ("anchors",),
    ("engine",),
    ("runner",),
    ("server", "integrations", "bench"),
    ("cli",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
STRANGERS = ("workflow", "cache", "anchors")
NO_TORCH = (
    "kedge",
    "kedge.workflow",
    "kedge.policies",
    "kedge.cache",
    "kedge.reuse",
    "kedge.runner.run",
    "kedge.settings",
    "kedge.cli.main",
)
STDLIB_ONLY = {"workflow": {"yaml", "pydantic"}, "cache": set[str](), "structures": set[str](), "policies": set[str]()}
"""Rooms that need nothing but Python, with what they may import all the same."""


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(file: Path) -> Iterator[str]:
    """Absolute names of all modules that a file imports, lazily and for type checking too."""
    package = ("kedge", *file.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join((*base, *filter(None, [node.module])))
            yield stem
            if stem == "kedge":
                yield from (f"kedge.{alias.name}" for alias in node.names)


def rooms_used(file: Path) -> set[str]:
    """Rooms that a file imports from, its own apart."""
    parts = (name.split(".") for name in imports(file))
    return {part[1] for part in parts if part[0] == "kedge" and len(part) > 1} - {room_of(file), "__version__"}


ROOM_FILES = [file for file in files() if room_of(file) != "__init__"]


@pytest.mark.parametrize("file", ROOM_FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_down(file: Path) -> None:
    assert room_of(file) in FLOOR, "a new room needs a floor"
    upward = {used for used in rooms_used(file) if FLOOR[used] > FLOOR[room_of(file)]}
    assert not upward


def test_workflow_cache_and_anchors_are_strangers() -> None:
    for file in ROOM_FILES:
        if room_of(file) in STRANGERS:
            assert not rooms_used(file) & set(STRANGERS), file


def test_rooms_form_no_circle() -> None:
    graph: dict[str, set[str]] = {}
    for file in ROOM_FILES:
        graph.setdefault(room_of(file), set()).update(rooms_used(file))
    TopologicalSorter(graph).prepare()


def test_nothing_imports_the_package_itself() -> None:
    """`kedge/__init__.py` is the front door for people; rooms name each other."""
    for file in ROOM_FILES:
        assert rooms_used(file) <= set(FLOOR), file


@pytest.mark.parametrize("room", STDLIB_ONLY)
def test_stdlib_only(room: str) -> None:
    allowed = sys.stdlib_module_names | {"kedge"} | STDLIB_ONLY[room]
    for file in sorted((PACKAGE / room).rglob("*.py")):
        assert {name.split(".")[0] for name in imports(file)} <= allowed, file


def test_reuse_handles_no_tensors_itself() -> None:
    for file in sorted((PACKAGE / "reuse").rglob("*.py")):
        assert "torch" not in {name.split(".")[0] for name in imports(file)}, file


def test_bench_uses_the_public_api_only() -> None:
    for file in sorted((PACKAGE / "bench").rglob("*.py")):
        private = {
            part for name in imports(file) for part in name.split(".") if part.startswith("_") and part[1] != "_"
        }
        assert not private, file


@pytest.mark.parametrize("module", NO_TORCH)
def test_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_the_parser_sees_relative_and_lazy_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    file = tmp_path / "cache" / "bad.py"
    file.parent.mkdir()
    file.write_text("from ..engine import base\nfrom . import tree\ndef f():\n    from kedge import anchors\n")
    assert set(imports(file)) == {"kedge.engine", "kedge.cache", "kedge", "kedge.anchors"}
    assert rooms_used(file) == {"engine", "anchors"}
