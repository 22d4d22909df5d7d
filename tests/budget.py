"""What the package has of everything that has a budget in `budget.toml`: lines by room, settings, constants."""

from __future__ import annotations

import ast
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer.main
from pydantic import BaseModel

from tests.source import PACKAGE, files, tree

ROOT = PACKAGE.parents[1]
FILE = ROOT / "tests" / "budget.toml"


@dataclass(frozen=True, slots=True)
class Budget:
    """The budgets of one state of the file."""

    whole: Mapping[str, int]
    rooms: Mapping[str, int]

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read the file's text."""
        data = tomllib.loads(text)
        return cls(data["whole"], data["rooms"])


def history() -> Iterator[Budget]:
    """Yield the budgets of all commits that changed them, the oldest first, then those of the working tree. A merge is
    one commit: its branches have counted without each other.

    Without git, or in a clone without history, only what is there.
    """
    where = FILE.relative_to(ROOT).as_posix()
    for commit in _git("log", "--first-parent", "--reverse", "--format=%H", "--", where).split():
        if text := _git("show", f"{commit}:{where}"):
            yield Budget.parse(text)
    yield Budget.parse(FILE.read_text(encoding="utf-8"))


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def overspent(spent: Mapping[str, int], budget: Mapping[str, int]) -> dict[str, int]:
    """Return what each room over its budget has to give, and what the others could give instead, below 0."""
    left = {room: spent.get(room, 0) - most for room, most in budget.items()}
    return left if max(left.values()) > 0 else {}


def lines_by_room(rooms: Mapping[str, int]) -> Counter[str]:
    """Count the lines of the package by room. A file counts for the innermost room of the budget that it is in."""
    found: Counter[str] = Counter()
    for file in files():
        found[room_of(file.relative_to(PACKAGE), rooms)] += lines(file)
    return found


def room_of(file: Path, rooms: Mapping[str, int]) -> str:
    """Return the innermost room of the budget that a file is in; `root` for a module of the package itself."""
    above = (parent.as_posix() for parent in file.parents)
    return next((name for name in above if name in rooms), "root" if len(file.parts) == 1 else file.parts[0])


def lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def settings(section: type[BaseModel]) -> Iterator[str]:
    """Yield the settings of a section and of those in it, each by its name in there."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from (f"{name}.{inner}" for inner in settings(field.annotation))
        else:
            yield name


def constants() -> list[str]:
    """Return the numeric constants of all modules of the package, by file and name."""
    return [f"{file.relative_to(PACKAGE)}: {name}" for file in files() for name in numbers(tree(file))]


def numbers(module: ast.Module) -> Iterator[str]:
    """Yield the names that a module binds to numbers at its top, however they are written."""
    for node in module.body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _bound(target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value:
            yield from _bound(node.target, node.value)


def _bound(target: ast.expr, value: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, its in zip(target.elts, value.elts, strict=False):
            yield from _bound(one, its)
    elif isinstance(target, ast.Name) and _is_number(value):
        yield target.id


def _is_number(value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):
        return isinstance(value.value, int | float) and not isinstance(value.value, bool)
    if isinstance(value, ast.UnaryOp):
        return _is_number(value.operand)
    return isinstance(value, ast.BinOp) and _is_number(value.left) and _is_number(value.right)


def commands(group: Any) -> Iterator[str]:
    """Yield the commands of a Typer app, those of its groups by `group name`; none that only a checkout has."""
    found = typer.main.get_command(group) if isinstance(group, typer.Typer) else group
    for name, command in found.commands.items():
        if hasattr(command, "commands"):
            yield from (f"{name} {inner}" for inner in commands(command))
        else:
            yield name
