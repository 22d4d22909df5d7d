"""The bundled model goes by its name, and what is no model says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from kedge.engine.common.model_folder import model_path
from kedge.errors import ModelNotFound
from kedge.models import NANO, default_model, find_model, is_bundled


def test_the_name_is_a_folder_of_the_package_and_nothing_is_the_default(tmp_path: Path) -> None:
    assert model_path(None) == default_model() == model_path(NANO) == model_path(Path(NANO))
    assert (default_model() / "config.json").is_file()
    for folder in (tmp_path, Path("llama")):
        with pytest.raises(ModelNotFound, match="by name are nano and smollm2"):
            model_path(folder)
    (tmp_path / "config.json").touch()
    assert model_path(tmp_path) == tmp_path


def test_a_folder_here_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NANO).mkdir()
    (tmp_path / NANO / "config.json").touch()
    assert not is_bundled(NANO) and model_path(NANO) == Path(NANO)
    assert is_bundled(None) and model_path(None) == default_model() != Path(NANO)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("Qwen/Qwen3-0.6B", "hf download Qwen/Qwen3-0.6B"),
        ("pytorch_model.bin", "name its folder"),
        ("model.safetensors", "name its folder"),
        ("absent.gguf", "no such folder"),
    ],
)
def test_what_is_no_folder_says_what_to_do(
    name: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "/" not in name and "absent" not in name:
        Path(name).write_bytes(b"x")
    with pytest.raises(ModelNotFound, match=advice):
        find_model(name)
