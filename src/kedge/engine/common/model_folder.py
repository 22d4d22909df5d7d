"""The folder of a model and the config in it."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

import kedge.models.nano
from kedge.errors import ModelNotFound, UnsupportedModel


def model_path(model: str | Path | None) -> Path:
    """Return the folder of a model; None stands for the model that comes with the package."""
    return Path(model) if model is not None else Path(kedge.models.nano.__path__[0])


def read_config(path: Path) -> PretrainedConfig:
    """Return a folder's config. Raises `ModelNotFound`, or `UnsupportedModel` where Transformers cannot read it."""
    if not (path / "config.json").is_file():
        raise ModelNotFound("model", str(path), "no such folder, or no config.json in it")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # every family checks its values in a way of its own
        raise UnsupportedModel("model", str(path), f"its config cannot be read: {error}") from error
