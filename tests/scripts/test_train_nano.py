"""A training in parts is one training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.train_nano import RECORD, arguments, train

TINY = [
    "--size", "tiny", "--minutes", "0.05", "--batch", "2", "--precision", "fp32", "--device", "cpu", "--resume",
    "--tokenizer", "src/kedge/models/nano",
]  # fmt: skip


def trained(out: Path, *more: str) -> dict[str, Any]:
    train(arguments().parse_args([*TINY, "--out", str(out), *more]))
    return json.loads((out / RECORD).read_text())


def test_a_part_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    first = trained(tmp_path, "--stop-after", "1")
    assert 0 < first["trained_minutes"] < first["minutes"]
    second = trained(tmp_path)
    assert second["trained_minutes"] >= second["minutes"]
    assert second["steps"] > first["steps"] and second["tokens"] > first["tokens"]
    assert second["loss_curve"][: len(first["loss_curve"])] == first["loss_curve"]
    assert trained(tmp_path) == second, "nothing is left to be trained"


def test_another_size_is_not_gone_on_with(tmp_path: Path) -> None:
    trained(tmp_path, "--stop-after", "0.1")
    with pytest.raises(SystemExit, match="size tiny, not nano"):
        trained(tmp_path, "--size", "nano")
