"""Attention over runs of slots against a softmax written out, for every way in which queries and runs can lie."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kedge.engine.local.attention import paged
from kedge.engine.local.attention.latent import LatentWeights
from kedge.engine.local.attention.paged import (
    FEW,
    Scoring,
    SequenceSlice,
    _attend,
    _attend_in_parts,
    _attend_latents,
    _attend_lower_right,
    _attend_one,
    _attend_written_out,
    kernels_of,
)
from tests.engine.local.conftest import DEVICE

HEADS, KV_HEADS, DIM, SCALE = 8, 4, 16, 0.25
RUNS = [
    (slice(100, 900),),
    (slice(900, 1100), slice(100, 700)),
    (slice(1184, 1200), slice(16, 32), slice(200, 968)),
    tuple(slice(start, start + 80) for start in range(0, 1200, 120)),
]
POSITIONS = {
    "the last": [799],
    "scattered over all runs": [0, 1, 2, 50, 300, 799],
    "from a later run on": [250, 251, 600, 799],
    "a chunk": list(range(770, 800)),
    "many": list(range(800 - 2 * FEW, 800)),
    "many with gaps": [3, 200, *range(300, 800)],
    "all": list(range(800)),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def expected(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, how: Scoring) -> Tensor:
    """[queries, heads, dim] by float64, from query [heads, queries, dim] and contiguous KV [context, kv_heads, dim]."""
    keys, values = (x.repeat_interleave(len(query) // x.shape[1], dim=1).double() for x in (keys, values))
    places = torch.arange(len(keys), device=keys.device)
    seen = places <= positions[:, None]
    if how.window is not None:
        seen &= places > positions[:, None] - how.window
    scores = torch.einsum("hqd,khd->hqk", query.double(), keys) * how.scaling
    scores = how.softcap * (scores / how.softcap).tanh() if how.softcap else scores
    weights = scores.masked_fill(~seen, -torch.inf).exp()
    nowhere = 0 if how.sinks is None else how.sinks.double().exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights / (weights.sum(-1, keepdim=True) + nowhere), values).float()


def sequence_of(
    positions: list[int], runs: tuple[slice, ...], context: int = 800, start: int = 0, device: Any = "cpu"
) -> SequenceSlice:
    places, contiguous = torch.tensor(positions), positions[0] == context - len(positions)
    return SequenceSlice(start, start + len(positions), runs, context, places.to(device), contiguous)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("beside_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 64, 10_000])
@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize(
    ("attend", "runs", "softcap"),
    [*((_attend, runs, None) for runs in RUNS), *((_attend_written_out, RUNS[1], cap) for cap in (None, 1.5))],
    ids=["one run", "two runs", "three runs", "short runs", "written out, as on a GPU", "capped"],
)
def test_attention_reads_its_context_run_by_run(
    attend: Any,
    runs: tuple[slice, ...],
    softcap: float | None,
    where: str,
    window: int | None,
    beside_sinks: bool,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    keys, values = (torch.randn(1200, KV_HEADS, DIM).to(dtype) for _ in range(2))
    sinks = 2 * torch.randn(HEADS).to(dtype) if beside_sinks else None
    sequence, how = sequence_of(POSITIONS[where], runs), Scoring(SCALE, window, softcap, sinks)
    query = torch.randn(HEADS, len(sequence.positions), DIM).to(dtype)
    out = attend(query, (keys, values), sequence, how)
    keys, values = (torch.cat([x[run] for run in runs]) for x in (keys, values))
    assert (out.float() - expected(query, keys, values, sequence.positions, how)).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("queries", [1, 5, 40])
def test_a_gpu_sees_the_same_of_a_chunk(queries: int) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, count, DIM) for count in (queries, 40, 40))
    got = _attend_lower_right(query, key, value, SCALE)
    torch.testing.assert_close(got, _attend_in_parts(query, key, value, None, SCALE), atol=1e-5, rtol=1e-5)


RANK, ROTATED, VALUE = 24, 4, 10
LATENT_SCORES = {
    "plain": Scoring(SCALE),
    "window": Scoring(SCALE, window=64),
    "sinks": Scoring(SCALE, sinks=torch.linspace(-2, 2, HEADS)),
    "capped": Scoring(SCALE, softcap=1.5),
}


@pytest.mark.parametrize("at_once", [1, 70_000, paged.EXPANDED], ids=["one head", "some heads", "all heads"])
@pytest.mark.parametrize("how", LATENT_SCORES.values(), ids=LATENT_SCORES)
def test_attention_to_rows_is_that_to_keys_and_values_for_few_queries_and_for_many(
    how: Scoring, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass over sequences of all kinds, as the keys and values of all heads give it."""
    monkeypatch.setattr(paged, "EXPANDED", at_once)
    torch.manual_seed(0)
    latent = LatentWeights(torch.randn(HEADS, DIM - ROTATED + VALUE, RANK) * RANK**-0.5, VALUE)
    pool = torch.randn(1200, 1, RANK + ROTATED)
    keys, values = latent.expanded(pool[:, 0], slice(None))
    sequences, expanded, start = [], [], 0
    for positions, runs in zip(POSITIONS.values(), [*RUNS, *RUNS], strict=False):
        sequences.append(sequence_of(positions, runs, start=start))
        expanded.append(latent.is_worth_expanding(len(positions), 800, RANK + ROTATED))
        start += len(positions)
    assert {*expanded} == {True, False}
    query = torch.randn(HEADS, start, DIM)

    out = _attend_latents(query, pool, sequences, how, latent)

    for one in sequences:
        key, value = (torch.cat([x[run] for run in one.runs]) for x in (keys, values))
        wanted = expected(query[:, one.start : one.stop], key, value, one.positions, how)
        torch.testing.assert_close(out[one.start : one.stop], wanted[..., :VALUE], atol=1e-5, rtol=1e-4)


# attention in half precision: on a GPU PyTorch chooses between several kernels ----------------------------------------

AWKWARD = (769, 801, 833, 1000, 1025)
SHAPES = {"8B": (32, 8, 128), "few": (8, 2, 64), "seven in a group": (28, 4, 128)}
WHERE: dict[str, Callable[[int], list[int]]] = {
    "all": lambda context: list(range(context)),
    "the last": lambda context: [context - 1],
    "a chunk": lambda context: list(range(context - 150, context)),
    "scattered": lambda context: [*range(3, 300, 7), *range(400, 470), context - 1],
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("shape", SHAPES if DEVICE.type == "cuda" else ["few"])
def test_attention_is_right_at_lengths_that_no_tile_divides(
    shape: str, where: str, window: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    heads, kv_heads, dim = SHAPES[shape]
    one, other = (torch.randn(1100, kv_heads, dim, device=DEVICE).to(dtype) for _ in range(2))
    pools, how = (one, other), Scoring(dim**-0.5, window)
    for context in AWKWARD if DEVICE.type == "cuda" else AWKWARD[:1]:
        sequence = sequence_of(WHERE[where](context), (slice(40, 40 + context),), context, device=DEVICE)
        query = torch.randn(heads, len(sequence.positions), dim, device=DEVICE).to(dtype)
        with kernels_of(DEVICE):
            got = _attend_one(query, pools, sequence, how)
        keys, values = (x[40 : 40 + context] for x in pools)
        wanted = expected(query, keys, values, sequence.positions, how)
        assert (got.float() - wanted).abs().max() < TOLERANCE[dtype]
