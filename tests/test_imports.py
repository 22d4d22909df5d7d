"""The directions of imports: down the floors of the package, and never into what a room must not know."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.import_graph import ImportGraph, Name

GRAPH = ImportGraph(Path(__file__).parents[1] / "src" / "kedge")
FLOORS = (
    ("types", "guard", "errors", "settings", "hints", "checks", "decisions"),
    ("structures",),
    ("policies", "workflow"),
    ("cache", "kv", "models"),
    ("anchors", "workloads"),
    ("reuse", "discovery"),
    ("engine",),
    ("runner",),
    ("server", "integrations", "bench"),
    ("cli",),
    ("__main__",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
STRANGERS = {"workflow", "cache", "anchors"}
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
STDLIB_ONLY = {"workflow": {"yaml", "pydantic"}, "cli": {"rich", "torch", "transformers", "typer"}}
STDLIB_ONLY |= dict.fromkeys(("cache", "structures", "policies", "discovery"), set[str]())
"""Rooms that need nothing but Python, with what they may import all the same."""
MODULES = [module for module in GRAPH.files if len(module) > 1]


def modules_of(room: str) -> list[Name]:
    return GRAPH.inside(("kedge", room))


def rooms_used(module: Name) -> set[str]:
    """The rooms that a module imports from, its own excepted."""
    return {name[1] for name in GRAPH.imported(module) if len(name) > 1} - {module[1]}


def packages_used(module: Name) -> set[str]:
    """The top-level packages that a module imports."""
    return {name[0] for name in GRAPH.names(module)}


@pytest.mark.parametrize("module", MODULES, ids=".".join)
def test_imports_point_down(module: Name) -> None:
    assert module[1] in FLOOR, "a new room needs a floor"
    upward = {used for used in rooms_used(module) if FLOOR[used] > FLOOR[module[1]]}
    assert not upward


def test_workflow_cache_and_anchors_are_strangers() -> None:
    for room in STRANGERS:
        for module in modules_of(room):
            assert not rooms_used(module) & STRANGERS, module


def test_nothing_imports_the_package_itself() -> None:
    """`kedge/__init__.py` is the front door for people; rooms name each other. Only the version is there for them."""
    for module in MODULES:
        own = {name[1:2] for name in GRAPH.names(module) if name[0] == "kedge"}
        assert own <= {(room,) for room in (*FLOOR, "__version__")}, module


def test_nothing_imports_a_package_that_it_is_in() -> None:
    for module in MODULES:
        assert not {module[:size] for size in range(2, len(module))} & GRAPH.imported(module), module


@pytest.mark.parametrize("room", STDLIB_ONLY)
def test_stdlib_only(room: str) -> None:
    allowed = sys.stdlib_module_names | {"kedge"} | STDLIB_ONLY[room]
    for module in modules_of(room):
        assert packages_used(module) <= allowed, module


def test_reuse_handles_no_tensors_itself() -> None:
    for module in modules_of("reuse"):
        assert "torch" not in packages_used(module), module


def test_integrations_share_nothing_with_the_embedded_engine() -> None:
    for module in modules_of("integrations"):
        assert not any(name[:3] == ("kedge", "engine", "local") for name in GRAPH.imported(module)), module


def test_the_package_never_imports_the_benchmarks_by_name() -> None:
    """A checkout has them, a wheel has not: `kedge.cli.bench` looks for them."""
    for module in GRAPH.files:
        assert not any(name[0] == "benchmarks" for name in GRAPH.names(module)), module


IMPORTING = """
import sys
from importlib import import_module
for module in sys.argv[1:]:
    import_module(module)
    assert "torch" not in sys.modules, module
"""


def test_these_import_no_torch() -> None:
    """All in one process: the first that imports it is named."""
    command = [sys.executable, "-c", IMPORTING, *NO_TORCH]
    done = subprocess.run(command, check=False, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
