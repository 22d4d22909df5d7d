"""The real model is where tests look for it: in continuous integration a missing package fails, elsewhere it skips."""

from __future__ import annotations

from tests.real import in_ci, missing


def test_ci_has_the_real_model() -> None:
    assert not (in_ci() and missing()), missing()
