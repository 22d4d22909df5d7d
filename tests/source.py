"""The package's source as a tree: its functions, classes and what is documented of it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

PACKAGE = Path(__file__).parents[1] / "src" / "kedge"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Definition:
    """A module, class or function with the place where it is."""

    file: Path
    node: Any
    """Its `ast.Module`, `ast.ClassDef` or `Function`."""

    def __str__(self) -> str:
        place = self.file.relative_to(PACKAGE)
        return str(place) if isinstance(self.node, ast.Module) else f"{place}:{self.node.lineno} {self.node.name}"

    @property
    def is_documented(self) -> bool:
        return ast.get_docstring(self.node) is not None

    @property
    def lines(self) -> int:
        """From the signature to the end, docstring included."""
        return (self.node.end_lineno or 0) - self.node.lineno + 1

    @property
    def signature_lines(self) -> int:
        return self.node.body[0].lineno - self.node.lineno


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def files() -> list[Path]:
    """The files of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def functions() -> list[Definition]:
    """All functions, methods and functions in functions."""
    return [Definition(file, node) for file in files() for node in ast.walk(tree(file)) if isinstance(node, Function)]


def classes() -> list[Definition]:
    found = ((file, node) for file in files() for node in ast.walk(tree(file)))
    return [Definition(file, node) for file, node in found if isinstance(node, ast.ClassDef)]


def public() -> Iterator[Definition]:
    """Modules, and the classes, functions and methods that have no underscore; neither setters nor tests."""
    for file in files():
        module = tree(file)
        yield Definition(file, module)
        for node in module.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield Definition(file, node)
                yield from (Definition(file, one) for one in node.body if is_public(one))
            elif is_public(node):
                yield Definition(file, node)


def is_public(node: ast.stmt) -> TypeGuard[Function]:
    if not isinstance(node, Function) or node.name.startswith(("_", "test_")):
        return False
    return not any(ast.unparse(one).endswith((".setter", "overload")) for one in node.decorator_list)
