"""Whether Triton can build kernels, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.kv.triton_device import DEVICE

probe_kernel = pytest.importorskip("kedge.kv.probe_kernel", reason="Triton is not installed")
WHERE = torch.device(DEVICE)


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    probe_kernel.can_build.cache_clear()
    yield
    probe_kernel.can_build.cache_clear()


def test_a_kernel_can_be_built_and_run() -> None:
    assert probe_kernel.can_build(WHERE)


class Failing:
    """A kernel that cannot be built."""

    def __init__(self) -> None:
        self.tries = 0

    def __getitem__(self, grid: object) -> Any:
        self.tries += 1
        raise RuntimeError("Failed to find C compiler")


def test_where_none_can_be_built_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing()
    monkeypatch.setattr(probe_kernel, "_fill", failing)
    with caplog.at_level(logging.WARNING):
        assert not probe_kernel.can_build(WHERE) and not probe_kernel.can_build(WHERE)
    assert failing.tries == 1 and "Failed to find C compiler" in caplog.text
