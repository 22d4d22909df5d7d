"""The drawing at the top of `errors.py` is the tree: same classes, same parents, same words."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import pytest

import kedge
from kedge import errors
from kedge.errors import KedgeError

LINE = re.compile(r"^(?P<lead>[│├└─ ]*)(?P<name>[A-Z]\w+)(?:\s{2,}(?P<text>.+))?$")
INDENT = 4


def drawn() -> dict[str, tuple[str, str]]:
    """Name -> (parent, text) of every line of the drawing."""
    tree: dict[str, tuple[str, str]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if (match := LINE.match(line)) and (match["text"] or match["name"] == "KedgeError"):
            path[len(match["lead"]) // INDENT :] = [match["name"]]
            tree[match["name"]] = (path[-2] if len(path) > 1 else "Exception", match["text"] or "")
    return tree


def defined() -> dict[str, type[KedgeError]]:
    members = inspect.getmembers(errors, inspect.isclass)
    return {name: cls for name, cls in members if cls.__module__ == errors.__name__}


def test_the_drawing_is_the_tree() -> None:
    parents = {name: parent for name, (parent, _) in drawn().items()}
    assert parents == {name: cls.__bases__[0].__name__ for name, cls in defined().items()}


def test_the_drawing_says_what_the_docstrings_say() -> None:
    for name, (_, text) in drawn().items():
        if name != "KedgeError":
            assert text.rstrip(".").lower() == (defined()[name].__doc__ or "").rstrip(".").lower()


def test_every_error_has_one_parent_and_no_sibling_twin() -> None:
    assert all(len(cls.__bases__) == 1 and issubclass(cls, KedgeError) for cls in defined().values())


def test_all_errors_are_exported() -> None:
    assert set(defined()) <= set(kedge.__all__)
    assert all(getattr(kedge, name) is cls for name, cls in defined().items())


@pytest.mark.parametrize("cls", defined().values(), ids=lambda cls: cls.__name__)
def test_a_message_names_the_key_and_the_value(cls: type[KedgeError]) -> None:
    error = cls("block_size", -1, "must be positive")
    assert str(error) == "block_size=-1: must be positive"
    assert (error.key, error.value, error.why) == ("block_size", -1, "must be positive")


@pytest.mark.parametrize("cls", defined().values(), ids=lambda cls: cls.__name__)
def test_a_copy_says_the_same(cls: type[KedgeError]) -> None:
    error = cls("block_size", (-1, "x"), "must be positive")
    error.add_note("in a test")
    for same in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (type(same), str(same), vars(same)) == (cls, str(error), vars(error))
