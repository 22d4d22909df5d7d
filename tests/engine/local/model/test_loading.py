"""Loading a model's weights shows a progress bar only where there are many of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.utils.logging import is_progress_bar_enabled

import kedge.models.nano
from kedge.engine.local.model import loading


@pytest.mark.parametrize(("least", "has_bar"), [(loading.MIN_BYTES_WITH_BAR, False), (0, True)])
def test_few_weights_are_loaded_without_a_progress_bar(
    least: int, has_bar: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "MIN_BYTES_WITH_BAR", least)
    loading.load(Path(kedge.models.nano.__path__[0]), torch.float32, torch.device("cpu"))
    assert ("Loading weights" in capsys.readouterr().err) == has_bar
    assert is_progress_bar_enabled()
