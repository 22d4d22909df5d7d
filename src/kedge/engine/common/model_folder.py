"""The folder of a model and the config in it, and the device and the dtype that the settings name or leave to the
machine. A GGUF file stands for the folder that it was converted to.
"""

import logging
from functools import cache, partial
from pathlib import Path
from time import perf_counter

import torch
from transformers import AutoConfig, PretrainedConfig

from kedge.engine.common.converted import find_copy, make_copy
from kedge.errors import ConfigError, ModelNotFound, UnsupportedModel
from kedge.models import find_model

logger = logging.getLogger(__name__)
SHORT = (torch.bfloat16, torch.float16)


def model_path(model: str | Path | None, dtype: str = "auto", device: str = "auto") -> Path:
    """Return the folder of a model, by path or by name; None stands for the default one. A GGUF file is converted to
    `dtype` first, unless it has been; `auto` is what the engine computes in on `device`.

    Raises `ModelNotFound`, `CorruptWeights`, `UnsupportedModel`, and `ConfigError` where a package is missing or the
    copy cannot be written.
    """
    path = find_model(model)
    if path.is_dir():
        return path
    chosen = dtype
    if dtype == "auto":
        chosen = "bfloat16" if pick_device(device).type != "cpu" or bfloat16_is_faster() else "float32"
    return find_copy(path, chosen) or _convert(path, chosen, dtype)


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


def pick_device(name: str) -> torch.device:
    """Return the device that the settings name. Raises `ConfigError` where this machine has none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("engine.device", name, "this machine has no CUDA device")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device, stored: torch.dtype | None = None) -> torch.dtype | str:
    """Return the dtype that the settings name. `auto` is that of the weights on a GPU; on the CPU it is bfloat16 for
    weights that are `stored` in 16 bits, where that is faster, and else float32.
    """
    if name != "auto":
        return getattr(torch, name)
    if device.type != "cpu":
        return "auto"
    return torch.bfloat16 if stored in SHORT and bfloat16_is_faster() else torch.float32


@cache
def bfloat16_is_faster(size: int = 2048, repeats: int = 12) -> bool:
    """Return whether this CPU multiplies in bfloat16 clearly faster: many rows, as in a prefill, by a quarter at
    least, and no slower for one row, as in decoding. Takes a fraction of a second, once.
    """
    weights = {dtype: torch.zeros(size, size, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    seconds = {(dtype, rows): float("inf") for dtype in weights for rows in (1, 64)}
    for _ in range(repeats):  # in turns, and the best of them: other work on the machine meets all
        for dtype, rows in seconds:
            vector = torch.zeros(rows, size, dtype=dtype)
            start = perf_counter()
            torch.nn.functional.linear(vector, weights[dtype])
            seconds[dtype, rows] = min(seconds[dtype, rows], perf_counter() - start)
    ratios = {rows: seconds[torch.float32, rows] / seconds[torch.bfloat16, rows] for rows in (1, 64)}
    return ratios[64] > 1.25 and ratios[1] >= 1
