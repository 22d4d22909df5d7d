"""The device and the dtype of a model that the settings name or leave to the machine."""

from __future__ import annotations

from functools import cache
from time import perf_counter

import torch

from kedge.errors import ConfigError

SHORT = (torch.bfloat16, torch.float16)


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
