"""The public surface: what `kedge` offers, where it comes from, and that nothing slips in."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kedge
from kedge import types

ROOT = Path(__file__).parents[1]
NOT_OFFERED = {"take_value", "Tokens", "WorkflowAgent", "is_owned", "new_request_id"}
"""Public names of `kedge.types` that only Kedge itself needs."""


def imported_for_checkers() -> dict[str, str]:
    """Name -> module of the imports that only type checkers see."""
    tree = ast.parse(Path(kedge.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.name: node.module or "" for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }


@pytest.mark.parametrize("name", kedge.__all__)
def test_every_name_is_there_and_documented(name: str) -> None:
    value = getattr(kedge, name)
    assert name in dir(kedge)
    if callable(value) and getattr(value, "__module__", "").startswith("kedge."):
        assert (value.__doc__ or "").strip()


@pytest.mark.parametrize(("name", "module"), kedge._LAZY.items())
def test_lazy_names_are_the_ones_of_their_rooms(name: str, module: str) -> None:
    assert getattr(kedge, name) is getattr(importlib.import_module(module), name)


def test_type_checkers_and_python_see_the_same() -> None:
    assert imported_for_checkers() == kedge._LAZY


def test_all_is_sorted_and_complete() -> None:
    assert kedge.__all__ == sorted(set(kedge.__all__))
    assert set(kedge._LAZY) <= set(kedge.__all__)


def test_the_vocabulary_is_offered() -> None:
    own = {name for name, value in vars(types).items() if getattr(value, "__module__", "") == types.__name__}
    assert {name for name in own if not name.startswith("_")} - NOT_OFFERED <= set(kedge.__all__)


def test_star_import_gives_exactly_the_public_names() -> None:
    namespace: dict[str, object] = {}
    exec("from kedge import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(kedge.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = kedge.nothing_like_this


def test_the_version_is_the_one_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == kedge.__version__


def test_the_front_door_loads_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "numpy", "pydantic", "typer", "rich", "yaml"}
    code = f"import sys, kedge; sys.exit(bool({heavy!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
