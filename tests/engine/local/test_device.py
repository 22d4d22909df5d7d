"""The engine on this machine's device, a GPU where there is one: Transformers' tokens, the KV of dense prefill."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kedge.engine.local.attention.paged import Scoring, SequenceSlice, _attend_one, kernels_of
from kedge.engine.local.build import EngineParts
from kedge.settings import TierSettings
from tests.engine.local.conftest import DEVICE, FAMILIES, engine_of, tiny_model
from tests.engine.local.test_engine import greedy, prompt, request

LENGTHS = (5, 70, 200)
ON_GPU = DEVICE.type == "cuda"
NARROW = {"kv_memory": "32 blocks", "tiers": TierSettings(host_memory="200 blocks", backup_hits=0)}


@pytest.mark.parametrize("room", [{}, NARROW], ids=["device", "tiers"])
@pytest.mark.parametrize("family", FAMILIES if ON_GPU else ["llama"])
def test_greedy_tokens_are_those_of_transformers(family: str, room: dict[str, object]) -> None:
    model = tiny_model(family).to(DEVICE)
    expected = [greedy(model, prompt(i, n), 24) for i, n in enumerate(LENGTHS)]
    with engine_of(model, max_batch_tokens=96, **room) as engine:
        assert (engine.runner.graphs is not None) == ON_GPU
        for _ in range(3):  # from the second time on with KV of the cache, be it on the host
            streams = [engine.submit(request(prompt(i, n))) for i, n in enumerate(LENGTHS)]
            assert [stream.result(120).tokens for stream in streams] == expected
        engine.wait_idle()
        engine.query(EngineParts.check_integrity)


# attention in half precision: on a GPU PyTorch chooses between several kernels ----------------------------------------

AWKWARD = (769, 801, 833, 1000, 1025)
SHAPES = {"8B": (32, 8, 128), "few": (8, 2, 64), "seven in a group": (28, 4, 128)}
WHERE: dict[str, Callable[[int], list[int]]] = {
    "all": lambda context: list(range(context)),
    "the last": lambda context: [context - 1],
    "a chunk": lambda context: list(range(context - 150, context)),
    "scattered": lambda context: [*range(3, 300, 7), *range(400, 470), context - 1],
}


def sequence_of(positions: list[int], context: int) -> SequenceSlice:
    places = torch.tensor(positions, device=DEVICE)
    contiguous = positions[0] == context - len(positions)
    return SequenceSlice(0, len(positions), (slice(40, 40 + context),), context, places, contiguous)


def masked_softmax(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scaling: float, window: int | None
) -> Tensor:
    """[queries, heads, dim] in float64, from query [heads, queries, dim] and KV [context, kv_heads, dim]."""
    keys, values = (x.double().repeat_interleave(len(query) // x.shape[1], dim=1) for x in (keys, values))
    places = torch.arange(len(keys), device=DEVICE)
    seen = places <= positions[:, None]
    if window is not None:
        seen &= places > positions[:, None] - window
    scores = torch.einsum("hqd,khd->hqk", query.double(), keys) * scaling
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("shape", SHAPES if ON_GPU else ["few"])
def test_attention_is_right_at_lengths_that_no_tile_divides(
    shape: str, where: str, window: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    heads, kv_heads, dim = SHAPES[shape]
    pool = [torch.randn(1, 1100, kv_heads, dim, device=DEVICE).to(dtype) for _ in range(2)]
    pools = pool[0][0], pool[1][0]
    for context in AWKWARD if ON_GPU else AWKWARD[:1]:
        sequence = sequence_of(WHERE[where](context), context)
        query = torch.randn(heads, len(sequence.positions), dim, device=DEVICE).to(dtype)
        with kernels_of(DEVICE):
            got = _attend_one(query, pools, sequence, Scoring(dim**-0.5, window))
        keys, values = (x[0, 40 : 40 + context] for x in pool)
        wanted = masked_softmax(query, keys, values, sequence.positions, dim**-0.5, window)
        assert (got.double() - wanted).abs().max() < (1e-5 if dtype == torch.float32 else 3e-2)
