"""Sets of methods: what each name stands for, and that the command takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.lab.methods import METHODS, SETS
from kedge.bench import fidelity
from kedge.bench.probe import method_named
from kedge.cli.main import app
from kedge.errors import ConfigError


@pytest.mark.parametrize("names", SETS.values(), ids=SETS)
def test_a_set_has_different_methods(names: tuple[str, ...]) -> None:
    assert not SETS.keys() & METHODS.keys()
    methods = [method_named(name, METHODS) for name in names]
    assert all(one not in methods[:at] for at, one in enumerate(methods))


def test_levels_of_a_frontier_grow() -> None:
    levels = [
        method_named(name, METHODS).config({}, {}).anchors.weak_error
        for name in SETS["frontier"]
        if name.startswith("token:")
    ]
    assert levels == [0.15, 0.3, 0.5, 0.8]


def test_the_command_takes_sets_among_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def measure(workload: object, questions: object, methods: Mapping[str, Any], *_: object) -> None:  # noqa: ARG001
        taken.extend(methods)
        raise ConfigError("seen", taken, "is all that this test asks for")

    monkeypatch.setattr(fidelity, "measure", measure)
    done = CliRunner().invoke(
        app, ["bench", "fidelity", "--model", "nano", "--methods", "dense,table-5,token:capacity=4"]
    )
    assert done.exit_code == 2
    assert taken == ["dense", *SETS["table-5"], "token:capacity=4"]
