"""Every error is one of a tree, is exported, names the key and the value, and survives a copy."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

import kedge
from kedge import errors
from kedge.errors import KedgeError


def defined() -> dict[str, type[KedgeError]]:
    members = inspect.getmembers(errors, inspect.isclass)
    return {name: cls for name, cls in members if cls.__module__ == errors.__name__}


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
