"""The folder of a model and the config in it."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from kedge.errors import ModelNotFound, UnsupportedModel
from kedge.models import bundled, default_model


def model_path(model: str | Path | None) -> Path:
    """Return the folder of a model: one of the disk, or by its name one that comes with the package; None stands for
    the default one of these.
    """
    return default_model() if model is None else bundled(model) or Path(model)


def read_config(path: Path) -> PretrainedConfig:
    """Return a folder's config. Raises `ModelNotFound`, or `UnsupportedModel` where Transformers cannot read it."""
    if not (path / "config.json").is_file():
        raise ModelNotFound("model", str(path), "no such folder, or no config.json in it")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # every family checks its values in a way of its own
        raise UnsupportedModel("model", str(path), f"its config cannot be read: {error}") from error
