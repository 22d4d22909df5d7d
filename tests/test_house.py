"""The rules that keep the package readable: files and functions of a size to read, unique names, docs, no circles.

How much there may be of it in all is in `tests/budget.toml`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from scripts.import_graph import ImportGraph, Name, circular
from tests.source import PACKAGE, Definition, classes, files, functions, public, rooms

MAX_FUNCTION, MAX_FILE = 60, 800
DOCUMENTED = 0.94
"""The share of what is public that has a docstring; the rest is methods that a base class or a protocol documents."""
GRAPH = ImportGraph(PACKAGE)
TESTS = Path(__file__).parent


@pytest.mark.parametrize("room", rooms())
def test_files_are_bounded(room: str) -> None:
    lines = {str(file): len(file.read_text(encoding="utf-8").splitlines()) for file in files(room)}
    assert not {file: count for file, count in lines.items() if count > MAX_FILE}


def test_files_of_tests_are_bounded() -> None:
    lines = {str(file): len(file.read_text(encoding="utf-8").splitlines()) for file in TESTS.rglob("*.py")}
    assert not {file: count for file, count in lines.items() if count > MAX_FILE}


@pytest.mark.parametrize("room", rooms())
def test_functions_are_bounded(room: str) -> None:
    """Kernels are one function each by necessity, and the options of a command are its signature."""
    long = {str(one): size for one in functions(room) if (size := counted_lines(one)) > MAX_FUNCTION}
    assert not long


def counted_lines(function: Definition) -> int:
    if function.file.name.endswith("_kernel.py"):
        return 0
    is_command = function.file.parent == PACKAGE / "cli"
    return function.lines - (function.signature_lines if is_command else 0)


def test_a_class_name_occurs_once() -> None:
    names = Counter(one.node.name for one in classes())
    assert not [name for name, count in names.items() if count > 1]


def test_what_is_public_is_documented() -> None:
    found = list(public())
    missing = [str(one) for one in found if not one.is_documented]
    assert len(missing) <= (1 - DOCUMENTED) * len(found), "\n".join(missing)


@pytest.mark.parametrize("package", [".".join(name) for name in GRAPH.packages])
def test_siblings_form_no_circle(package: str) -> None:
    name: Name = tuple(package.split("."))
    assert not circular(GRAPH.siblings(name))
