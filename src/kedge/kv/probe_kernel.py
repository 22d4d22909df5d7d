"""The smallest Triton kernel, which shows whether any can be built and run. Importing this module needs Triton."""

from __future__ import annotations

import logging
from functools import cache

import torch
import triton
import triton.language as tl

logger = logging.getLogger(__name__)


@triton.jit
def _fill(target):
    tl.store(target, 1)


@cache
def can_build(device: torch.device) -> bool:
    """Return whether a kernel can be built and run on a device. To build one Triton compiles C at run time, which slim
    images lack a compiler for, and it supports only some GPUs.
    """
    target = torch.zeros(1, dtype=torch.int32, device=device)
    try:
        _fill[(1,)](target)
        return bool(target.item())
    except Exception as error:  # Triton's errors have no common class
        logger.warning("Triton can't build kernels for %s, so PyTorch's operations take their place: %s", device, error)
        return False
