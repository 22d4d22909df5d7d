"""The folder of a model and the config in it. A GGUF file stands for the folder that it was converted to."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig

from kedge.engine.common.converted import find_copy, make_copy
from kedge.engine.common.dtypes import bfloat16_is_faster, pick_device
from kedge.errors import ModelNotFound, UnsupportedModel
from kedge.models import find_model

logger = logging.getLogger(__name__)


def model_path(model: str | Path | None, dtype: str = "auto", device: str = "auto") -> Path:
    """Return the folder of a model, by path or by name; None stands for the default one. A GGUF file is converted to
    `dtype` first, unless it has been; `auto` is what the engine computes in on `device`.

    Raises `ModelNotFound`, `CorruptWeights`, `UnsupportedModel`, and `ConfigError` where a package is missing or the
    copy cannot be written.
    """
    path = find_model(model)
    if path.is_dir():
        return path
    chosen = _dtype(dtype, device)
    return find_copy(path, chosen) or _convert(path, chosen, dtype)


def _dtype(dtype: str, device: str) -> str:
    if dtype != "auto":
        return dtype
    return "bfloat16" if pick_device(device).type != "cpu" or bfloat16_is_faster() else "float32"


def _convert(path: Path, chosen: str, asked: str) -> Path:
    from kedge.engine.common.gguf_files import GGUFFile

    file = GGUFFile(path)
    if asked == "auto" and file.is_float32:
        chosen = "float32"
        if found := find_copy(path, chosen):
            return found
    logger.info("converting %s to %s, once", path, chosen)
    return make_copy(path, chosen, partial(file.convert, dtype=getattr(torch, chosen)))


def read_config(path: Path) -> PretrainedConfig:
    """Return a folder's or a GGUF file's config. Raises `ModelNotFound`, or `UnsupportedModel` where Transformers
    cannot read it.
    """
    if path.is_file():
        from kedge.engine.common.gguf_files import GGUFFile

        return GGUFFile(path).config()
    if not (path / "config.json").is_file():
        raise ModelNotFound("model", str(path), "no such folder, or no config.json in it")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # every family checks its values in a way of its own
        raise UnsupportedModel("model", str(path), f"its config cannot be read: {error}") from error
