"""Which cases of a parametrized test run on every push, and which in `make test-all` only."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def on_push(cases: Iterable[str], kept: Collection[str]) -> list[Any]:
    """Return all cases, those that are not kept marked as slow."""
    return [case if case in kept else pytest.param(case, marks=pytest.mark.slow) for case in cases]
