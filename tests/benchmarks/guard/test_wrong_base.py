"""A wrong base is the model's rotation at position 0 and none of it behind that."""

from __future__ import annotations

import pytest
import torch

from benchmarks.guard import faults as damage
from kedge.bench.shapes import load_model
from kedge.kv.rotary import Rotary
from kedge.settings import EngineSettings


def test_the_base_alone_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _ = load_model(None, EngineSettings())
    right = torch.stack(runner.rotary.tables)

    def tables() -> torch.Tensor:
        module = damage.WrongBase(runner.rotary)
        return torch.stack(Rotary(module, runner.max_positions, runner.device).tables)

    wrong = tables()
    assert torch.equal(wrong[:, 0], right[:, 0])
    assert torch.allclose(wrong[:, :, 0], right[:, :, 0], atol=1e-3), "the first frequency is 1 at any base"
    assert not torch.allclose(wrong[:, 1:100, 1:], right[:, 1:100, 1:], atol=1e-2)
    monkeypatch.setattr(damage, "TIMES_BASE", 1.0)
    assert torch.allclose(tables()[:, :512], right[:, :512], atol=1e-3)
