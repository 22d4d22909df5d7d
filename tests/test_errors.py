"""Every error is exported, names the key and the value, and survives a copy."""

from __future__ import annotations

import copy
import pickle

import pytest

import kedge
from kedge import errors
from kedge.errors import KedgeError

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
