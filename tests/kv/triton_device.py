"""Where tests of Triton kernels run: on a GPU, and where there is none in Triton's interpreter; and what they share."""

import os
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kedge.kv.storage import KernelSlots, PagedStorage

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton was imported before it was told to interpret", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")
on_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="there is no GPU")
"""For tests at the sizes of an 8B model, which tell how fast bytes are moved"""


class Turns(torch.nn.Module):
    """Rotary angles of a few dimensions, as Transformers' modules give them."""

    def __init__(self, rotary_dim: int) -> None:
        super().__init__()
        self.rotary_dim = rotary_dim

    def forward(self, _: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        speeds = 10.0 ** -torch.arange(0, 1, 2 / self.rotary_dim, device=position_ids.device)
        angles = position_ids[..., None] * speeds
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()


def error(got: Tensor, wanted: Tensor) -> float:
    """The largest error over the largest number."""
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())


def slots_of(storage: PagedStorage) -> KernelSlots:
    """The storage's slots for kernels, which the interpreter runs wherever they are."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PagedStorage, "has_kernels", True)
        return storage.kernel_slots


def seconds(work: Callable[[], object]) -> float:
    """The best of 20 runs, by the GPU's clock."""
    times = []
    for _ in range(20):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        work()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return min(times)
