"""Loading a model's weights shows a progress bar only where there are many of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.utils.logging import is_progress_bar_enabled

import kedge.models.nano
from kedge.engine.local.model import loading


@pytest.mark.parametrize("has_bar", [False, True])
def test_weights_in_a_single_file_are_loaded_without_a_progress_bar(
    has_bar: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in Path(kedge.models.nano.__path__[0]).iterdir():
        (tmp_path / file.name).symlink_to(file)
    if has_bar:
        (tmp_path / "more.safetensors").symlink_to(tmp_path / "model.safetensors")
    loading.load(tmp_path, torch.float32, torch.device("cpu"))
    assert ("Loading weights" in capsys.readouterr().err) == has_bar
    assert is_progress_bar_enabled()
