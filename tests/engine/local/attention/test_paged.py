"""Attention over runs of slots against a softmax written out, for every way in which queries and runs can lie."""

from __future__ import annotations

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
    _attend_causal,
    _attend_latents,
    _attend_lower_right,
    _attend_written_out,
    attend_plainly,
)

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


def expected(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, window: int | None, sinks: Tensor | None
) -> Tensor:
    """[queries, heads, dim], from query [heads, queries, dim] and contiguous KV [context, kv_heads, dim]."""
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=1).float() for x in (keys, values))
    places = torch.arange(len(keys))
    seen = places <= positions[:, None]
    if window is not None:
        seen &= places > positions[:, None] - window
    scores = (torch.einsum("hqd,khd->hqk", query.float(), keys) * SCALE).masked_fill(~seen, -torch.inf)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sinks.float().exp()[:, None, None])
    return torch.einsum("hqk,khd->qhd", weights, values)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("beside_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 64, 10_000])
@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize("runs", RUNS, ids=["one run", "two runs", "three runs", "short runs"])
def test_attention_reads_its_context_run_by_run(
    runs: tuple[slice, ...], where: str, window: int | None, beside_sinks: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    keys, values = (torch.randn(1200, KV_HEADS, DIM).to(dtype) for _ in range(2))
    sinks = 2 * torch.randn(HEADS).to(dtype) if beside_sinks else None
    positions = torch.tensor(POSITIONS[where])
    query = torch.randn(HEADS, len(positions), DIM).to(dtype)
    contiguous = bool(positions[0] == 800 - len(positions))
    sequence = SequenceSlice(0, len(positions), runs, 800, positions, contiguous)

    out = _attend(query, (keys, values), sequence, Scoring(SCALE, window, sinks=sinks))

    keys, values = (torch.cat([x[run] for run in runs]) for x in (keys, values))
    assert (out.float() - expected(query, keys, values, positions, window, sinks)).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("beside_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("where", POSITIONS)
def test_a_gpu_writes_out_what_it_has_no_kernel_for(where: str, window: int | None, beside_sinks: bool) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 1200, KV_HEADS, DIM)
    sinks = 2 * torch.randn(HEADS) if beside_sinks else None
    positions = torch.tensor(POSITIONS[where])
    query = torch.randn(HEADS, len(positions), DIM)
    contiguous = bool(positions[0] == 800 - len(positions))
    sequence = SequenceSlice(0, len(positions), RUNS[1], 800, positions, contiguous)

    out = _attend_written_out(query, (keys, values), sequence, Scoring(SCALE, window, sinks=sinks))

    keys, values = (torch.cat([x[run] for run in RUNS[1]]) for x in (keys, values))
    torch.testing.assert_close(out, expected(query, keys, values, positions, window, sinks), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("queries", [1, 5, 40])
def test_a_gpu_sees_the_same_of_a_chunk(queries: int) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, count, DIM) for count in (queries, 40, 40))
    got = _attend_lower_right(query, key, value, SCALE)
    torch.testing.assert_close(got, _attend_causal(query, key, value, SCALE), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("queries", [1, 5, 300])
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("beside_sinks", [False, True])
def test_scores_that_are_written_out_are_capped_masked_and_joined_by_sinks_in_this_order(
    beside_sinks: bool, cap: float | None, queries: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    query = torch.randn(HEADS, queries, DIM).to(dtype)
    key, value = (torch.randn(KV_HEADS, 400, DIM).to(dtype) for _ in range(2))
    sinks = torch.randn(HEADS).to(dtype) if beside_sinks else None
    mask = torch.where(torch.arange(400) <= torch.arange(400 - queries, 400)[:, None], 0.0, -torch.inf)

    out = attend_plainly(query, key, value, mask, SCALE, cap, sinks)

    key, value = (x.double().repeat_interleave(HEADS // KV_HEADS, dim=0) for x in (key, value))
    scores = query.double() @ key.transpose(1, 2) * SCALE
    weights = ((cap * (scores / cap).tanh() if cap else scores) + mask).exp()
    nowhere = 0 if sinks is None else sinks.double().exp()[:, None, None]
    assert (out.double() - weights / (weights.sum(-1, keepdim=True) + nowhere) @ value).abs().max() < TOLERANCE[dtype]


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
        contiguous, stop = positions[0] == 800 - len(positions), start + len(positions)
        sequences.append(SequenceSlice(start, stop, runs, 800, torch.tensor(positions), contiguous))
        expanded.append(latent.is_worth_expanding(len(positions), 800, RANK + ROTATED))
        start = stop
    assert {*expanded} == {True, False}
    query = torch.randn(HEADS, start, DIM)

    out = _attend_latents(query, pool, sequences, how, latent)

    for one in sequences:
        mine, context = (
            query[:, one.start : one.stop],
            [torch.cat([x[run] for run in one.runs]) for x in (keys, values)],
        )
        mask = one.mask(how.window, torch.float32)
        key, value = (x.transpose(0, 1) for x in context)
        wanted = attend_plainly(mine, key, value, mask, SCALE, how.softcap, how.sinks).transpose(0, 1)
        torch.testing.assert_close(out[one.start : one.stop], wanted[..., :VALUE], atol=1e-5, rtol=1e-4)


def test_a_pass_of_few_queries_only_is_attended_to_as_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LatentWeights, "expanded", None)
    latent = LatentWeights(torch.randn(HEADS, DIM - ROTATED + VALUE, RANK), VALUE)
    sequences = [
        SequenceSlice(i, i + 1, (slice(100 * i, 100 * i + 80),), 80, torch.tensor([79]), True) for i in range(3)
    ]
    out = _attend_latents(
        torch.randn(HEADS, 3, DIM), torch.randn(300, 1, RANK + ROTATED), sequences, Scoring(1), latent
    )
    assert out.shape == (3, HEADS, VALUE)
    assert out.isfinite().all()
