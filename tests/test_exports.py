"""The public surface: what `kedge` offers, where it comes from, that nothing slips in, and its errors."""

import ast
import copy
import pickle
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kedge
from kedge import errors, types
from kedge.errors import KedgeError
from tests.source import tree

ROOT = Path(__file__).parents[1]
NOT_OFFERED = {"take_value", "Tokens", "WorkflowAgent", "is_owned", "new_request_id"}
"""Public names of `kedge.types` that only Kedge itself needs."""


@pytest.mark.parametrize("name", kedge.__all__)
def test_every_name_is_there_and_documented(name: str) -> None:
    value = getattr(kedge, name)
    assert name in dir(kedge)
    if callable(value) and getattr(value, "__module__", "").startswith("kedge."):
        assert (value.__doc__ or "").strip()


def test_type_checkers_and_python_see_the_same() -> None:
    block = next(node for node in tree(Path(kedge.__file__)).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name: node.module for node in imports for alias in node.names} == kedge._LAZY


def test_all_is_sorted_and_has_the_lazy_names_and_the_vocabulary() -> None:
    own = {name for name, value in vars(types).items() if getattr(value, "__module__", "") == types.__name__}
    vocabulary = {name for name in own if not name.startswith("_")} - NOT_OFFERED
    assert kedge.__all__ == sorted(set(kedge.__all__)) and {*kedge._LAZY, *vocabulary} <= set(kedge.__all__)


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


ERRORS = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, KedgeError)]


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_an_error_is_exported_names_key_and_value_and_its_copies_say_the_same(cls: type[KedgeError]) -> None:
    assert getattr(kedge, cls.__name__) is cls and cls.__name__ in kedge.__all__ and len(cls.__bases__) == 1
    error = cls("block_size", (-1, "x"), "must be positive")
    error.add_note("in a test")
    assert str(error) == "block_size=(-1, 'x'): must be positive"
    assert (error.key, error.value, error.why) == ("block_size", (-1, "x"), "must be positive")
    for same in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (type(same), str(same), vars(same)) == (cls, str(error), vars(error))
