"""The import graph of a package, read from its import statements: lazy ones and those for type checking included."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

Name = tuple[str, ...]
"""A module's dotted name in parts: `("kedge", "cache", "manager")`."""
Arrows = Mapping[str, frozenset[str]]
"""What every sibling imports from the others."""


class ImportGraph:
    """Modules and packages below a package's folder, and what imports what."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = {self.name_of(file): file for file in sorted(folder.rglob("*.py"))}

    def name_of(self, file: Path) -> Name:
        """Return a module's name; an `__init__.py` is its package."""
        parts = (self.folder.name, *file.relative_to(self.folder).with_suffix("").parts)
        return parts[:-1] if parts[-1] == "__init__" else parts

    @cached_property
    def packages(self) -> tuple[Name, ...]:
        """All packages that hold anything but their `__init__.py`, the outermost first."""
        return tuple(sorted({name[:size] for name in self.files for size in range(1, len(name))}))

    def inside(self, package: Name) -> list[Name]:
        """Return the modules of a package at any depth, itself included."""
        return [name for name in self.files if name[: len(package)] == package]

    def names(self, module: Name) -> set[Name]:
        """Return the absolute names that a module imports, of whatever package: modules and what is in them."""
        return self._names[module]

    def imported(self, module: Name) -> set[Name]:
        """Return the modules of this package that a module imports, or imports something from."""
        own = (name for name in self.names(module) if name[0] == self.folder.name)
        return {name if self._is_module(name) else name[:-1] for name in own} - {module}

    def siblings(self, package: Name) -> Arrows:
        """Return what each direct member of a package imports from the other ones."""
        depth = len(package)
        arrows: dict[str, set[str]] = {}
        for module in self.inside(package):
            if module == package:
                continue
            used = {name[depth] for name in self.imported(module) if name[:depth] == package and len(name) > depth}
            arrows.setdefault(module[depth], set()).update(used - {module[depth]})
        return {member: frozenset(used) for member, used in arrows.items()}

    @cached_property
    def _names(self) -> Mapping[Name, set[Name]]:
        return {module: set(self._read(module)) for module in self.files}

    def _read(self, module: Name) -> Iterator[Name]:
        for node in ast.walk(ast.parse(self.files[module].read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (tuple(alias.name.split(".")) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                stem = (*self._base(module, node.level), *filter(None, (node.module or "").split(".")))
                yield from ((*stem, alias.name) for alias in node.names)

    def _base(self, module: Name, level: int) -> Name:
        """Return the package to which a relative import of so many dots is relative."""
        package = module if self.files[module].name == "__init__.py" else module[:-1]
        return package[: len(package) - level + 1] if level else ()

    def _is_module(self, name: Name) -> bool:
        return name in self.files or name in self.packages


def reachable(arrows: Arrows) -> dict[str, set[str]]:
    """Return what every sibling imports directly or by way of others; itself, where it is on a circle."""
    found: dict[str, set[str]] = {}
    for member in arrows:
        found[member], left = set(), list(arrows[member])
        while left:
            one = left.pop()
            if one not in found[member]:
                found[member].add(one)
                left += arrows[one]
    return found


def circular(arrows: Arrows) -> set[tuple[str, str]]:
    """Return the arrows that are part of a circle."""
    below = reachable(arrows)
    return {(member, used) for member in arrows for used in arrows[member] if member in below[used]}


def floors(arrows: Arrows) -> dict[str, int]:
    """Return the floor of every sibling: 1 plus the longest path down. Members of a circle share a floor."""
    below, found = reachable(arrows), dict[str, int]()

    def floor(member: str) -> int:
        if member not in found:
            found[member] = 1 + max((floor(one) for one in below[member] if member not in below[one]), default=0)
        return found[member]

    for member in arrows:
        floor(member)
    return found
