"""The rules that keep the package readable: files and functions of a size to read, unique names, docs, no circles.

How much there may be of it in all is in `tests/budget.toml`.
"""

from collections import Counter
from pathlib import Path

import pytest

from scripts.import_graph import ImportGraph, Name, circular
from tests.budget import lines
from tests.source import PACKAGE, Definition, classes, files, functions, public

MAX_FUNCTION, MAX_FILE = 60, 800
DOCUMENTED = 0.94
"""Share of what is public that has a docstring of its own; most others are methods of a documented base or protocol"""
GRAPH = ImportGraph(PACKAGE)
TESTS = Path(__file__).parent


def test_files_are_bounded() -> None:
    sizes = {str(file): lines(file) for file in (*files(), *TESTS.rglob("*.py"))}
    assert not {file: count for file, count in sizes.items() if count > MAX_FILE}


def test_functions_are_bounded() -> None:
    """Kernels are one function each by necessity, and the options of a command are its signature."""
    assert not {str(one): size for one in functions() if (size := counted_lines(one)) > MAX_FUNCTION}


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
