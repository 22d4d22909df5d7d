"""The attention function that Transformers models run with: it writes and reads the paged pool.

Registered under the name `kedge`. A forward pass gets one flattened batch [1, tokens] of several sequences; a `Batch`,
which Transformers passes on as a keyword argument, maps tokens to sequences: a `SequenceSlice` is one sequence's share
of it, with its context, and which of it each query sees.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from kedge.engine.local.attention.arguments import layer_of, require_known, without_batch
from kedge.engine.local.attention.latent import LatentWeights, rows_of
from kedge.kv.storage import PagedStorage, Runs, halves

ALONE = 512
"""Runs of at least this many tokens are read in place; shorter ones are copied together, which costs less than a call
each.
"""
ROWS = 256
"""Queries that attend under a mask at once"""
ALL = slice(None)
Rows = tuple[int | None, int | None]
"""Start and stop; slices cannot be keys before Python 3.12."""
NAME = "kedge"
FEW = 64
"""Up to this many queries, attention is bound by reading the context, not by arithmetic."""
EXPANDED = 1 << 25
"""Most numbers of keys and values that are computed from latents at once, unless one head has more"""
# What SDPA itself calls on a CPU. It gives the logarithm of the softmax's sum as well, by which parts can be joined.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True)
class Bias:
    """The mask of a part of the context, added to the scores: 0 where a query sees a key, else -inf."""

    scores: Tensor
    """[1, 1, queries, keys]"""
    seen: Tensor
    """[queries]: 0 where a query sees any of the keys, else -inf"""


@dataclass(slots=True)
class SequenceSlice:
    """One sequence's share of a batch: rows [start, stop) of the queries, and the place of its context."""

    start: int
    stop: int
    runs: Runs
    """Slots of positions 0 .. context-1."""
    context: int
    positions: Tensor
    """int64 [stop - start], ascending; the last one is context - 1"""
    contiguous: bool
    """Whether the positions are the last ones of the context, without gaps."""
    masks: dict[tuple[int | None, Rows, Rows], Tensor] = field(default_factory=dict)
    """Masks by sliding window, queries and keys, made once per pass for all layers."""
    biases: dict[tuple[int | None, int], list[Bias]] = field(default_factory=dict)
    """Biases of each part of the context by sliding window and group size, made once per pass for all layers."""

    def mask(self, window: int | None, dtype: torch.dtype, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """Return [queries, context], or these rows and columns of it: 0 where key j is visible to the query at position
        p (p - window < j <= p), else -inf.
        """
        key = window, (rows.start, rows.stop), (columns.start, columns.stop)
        if key not in self.masks:
            queries = self.positions[rows, None]
            keys = torch.arange(self.context, device=queries.device)[columns]
            hidden = keys > queries if window is None else (keys > queries) | (keys <= queries - window)
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=keys.device)
            self.masks[key] = zeros.masked_fill_(hidden, float("-inf"))
        return self.masks[key]

    def pieces(self, window: int | None) -> Iterator[tuple[slice, slice]]:
        """Yield the queries, some at a time, each time with the keys that they see."""
        count = self.stop - self.start
        for first in range(0, count, ROWS):
            rows = slice(first, min(first + ROWS, count))
            yield rows, self._seen(rows, window)

    def _seen(self, rows: slice, window: int | None) -> slice:
        """Return the keys that these queries see, or more where it would take the device's positions to tell."""
        if not self.contiguous:
            return slice(0, self.context)
        before = self.context - (self.stop - self.start)
        first = 0 if window is None else max(0, before + rows.start - window + 1)
        return slice(first, before + rows.stop)

    def parts(self) -> list[list[int]]:
        """Return the indices of runs that are attended to together: each long one alone, all short ones as one part."""
        sizes = [run.stop - run.start for run in self.runs]
        short = [i for i, size in enumerate(sizes) if size < ALONE]
        return [[i] for i, size in enumerate(sizes) if size >= ALONE] + ([short] if short else [])

    def part_biases(self, window: int | None, groups: int, dtype: torch.dtype) -> list[Bias]:
        """Return the mask of each part, repeated for the heads of a group."""
        if (window, groups) not in self.biases:
            columns = self.mask(window, dtype).repeat(groups, 1).split([r.stop - r.start for r in self.runs], dim=1)
            masks = [torch.cat([columns[i] for i in part], dim=1) for part in self.parts()]
            self.biases[window, groups] = [Bias(mask[None, None], mask.amax(dim=1)) for mask in masks]
        return self.biases[window, groups]


def attend_plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention [heads, queries, head_dim] over key and value [kv_heads, context, head_dim], for what PyTorch's
    fused kernels lack: capped scores (Gemma 2), where a score s becomes cap * tanh(s / cap) before the softmax, and on
    a GPU attention sinks and windows. The scores of all heads are materialised in float32; a group reads its keys once.

    `mask` [queries, context] is added to the capped scores. `sinks` [heads] are one more score of every query, whose
    weight goes to no token.
    """
    grouped = query.reshape(len(key), -1, *query.shape[1:])
    scores = (grouped.flatten(1, 2) @ key.transpose(1, 2)).float()
    scores = scores.mul_(scaling) if cap is None else scores.mul_(scaling / cap).tanh_().mul_(cap)
    scores = scores.view(*grouped.shape[:3], -1).add_(mask)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        sink = sinks.float().view(*grouped.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    return (weights.to(value.dtype).flatten(1, 2) @ value).view(query.shape)


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer's scores are computed from products of queries and keys."""

    scaling: float
    window: int | None = None
    """The last tokens that a query sees, its own included; None for all"""
    softcap: float | None = None
    sinks: Tensor | None = None
    """[heads]: one more score of every query, whose weight goes to no token"""


@dataclass(slots=True)
class ForwardBatch(ABC):
    """One forward pass: flattened tokens, their positions in their sequences, and the slots where their KV is written,
    each int64 [tokens].
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    logits_rows: Tensor
    """Rows that need logits."""
    storage: PagedStorage

    @abstractmethod
    def attend(self, layer: int, query: Tensor, how: Scoring, latent: LatentWeights | None = None) -> Tensor:
        """Return the attention of every token over its own context: query [heads, tokens, head_dim] -> [tokens, heads,
        head_dim], or [tokens, heads, value_dim] where the pool has latents.
        """


@dataclass(slots=True)
class Batch(ForwardBatch):
    """A pass with the sequences that its tokens belong to."""

    sequences: list[SequenceSlice]

    def attend(self, layer: int, query: Tensor, how: Scoring, latent: LatentWeights | None = None) -> Tensor:
        pools = self.storage.pools[layer]
        if latent is not None:
            return _attend_latents(query, pools[0], self.sequences, how, latent)
        out = torch.empty_like(query.transpose(0, 1), memory_format=torch.contiguous_format)
        for sequence in self.sequences:
            rows = slice(sequence.start, sequence.stop)
            out[rows] = _attend_one(query[:, rows], pools, sequence, how)
        return out


def kernels_of(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which SDPA takes kernels that are ready for every length: cuDNN's builds a plan for each new
    one, which took 60 to 75 ms on an H200 for attention of 0.4 ms.
    """
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    kedge: ForwardBatch | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Compute paged attention, with Transformers' signature: query [1, heads, tokens, key_dim] -> [1, tokens, heads,
    value_dim]. `s_aux` [heads] are attention sinks: one more score of every query, whose weight goes to no token.

    Raises `UnsupportedModel` for any other argument that a model's scores depend on.
    """
    if kedge is None:
        raise without_batch(module)
    require_known(module, {"attention_mask": attention_mask, **others})
    how = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    if kedge.storage.spec.latent:
        latent, rows = rows_of(module, key, value)
        layer = _store(module, kedge, *halves(rows))
        return kedge.attend(layer, query[0], how, latent)[None], None
    layer = _store(module, kedge, key[0].transpose(0, 1), value[0].transpose(0, 1))
    out = kedge.attend(layer, query[0], how)[None]
    return out if value.shape[-1] == out.shape[-1] else out[..., : value.shape[-1]].contiguous(), None


def _store(module: nn.Module, batch: ForwardBatch, keys: Tensor, values: Tensor) -> int:
    """Write a layer's keys and values [tokens, kv_heads, dim]. Returns the number of its pools."""
    layer = layer_of(module, batch.storage, keys, values)
    batch.storage.store(layer, batch.slots, keys, values)
    return layer


def _attend_one(query: Tensor, pools: tuple[Tensor, Tensor], sequence: SequenceSlice, how: Scoring) -> Tensor:
    """Return one sequence's attention: queries [heads, tokens, head_dim] over its context -> [tokens, heads,
    head_dim].
    """
    if how.window is not None and how.window >= sequence.context:
        how = replace(how, window=None)
    is_fused = query.device.type == "cpu" or (how.sinks is None and how.window is None)
    if how.softcap is None and is_fused:
        return _attend(query, pools, sequence, how)
    return _attend_written_out(query, pools, sequence, how)


def _attend_latents(
    query: Tensor, pool: Tensor, sequences: Sequence[SequenceSlice], how: Scoring, latent: LatentWeights
) -> Tensor:
    """Return all sequences' attention [tokens, heads, value_dim] over a pool of rows [slots, 1, rank + rotated]: the
    queries [heads, tokens, key_dim] of most of them are turned into queries to rows together.
    """
    out = query.new_empty(query.shape[1], len(query), latent.value_dim)
    few: list[SequenceSlice] = []
    for one in sequences:
        if latent.is_worth_expanding(one.stop - one.start, one.context, pool.shape[2]):
            out[one.start : one.stop] = _attend_expanded(query[:, one.start : one.stop], pool, one, how, latent)
        else:
            few.append(one)
    if few:
        rows: Tensor | slice = slice(None)
        if len(few) < len(sequences):
            rows = torch.cat([torch.arange(one.start, one.stop, device=query.device) for one in few])
        absorbed = latent.absorbed(query[:, rows]).split([one.stop - one.start for one in few], dim=1)
        parts = [_attend_one(mine, (pool, pool), one, how) for mine, one in zip(absorbed, few, strict=True)]
        out[rows] = latent.projected(torch.cat(parts))
    return out


def _attend_expanded(
    query: Tensor, pool: Tensor, sequence: SequenceSlice, how: Scoring, latent: LatentWeights
) -> Tensor:
    """Return one sequence's attention [tokens, heads, value_dim] over the keys and values that follow from its rows,
    computed for some heads at a time.
    """
    rows = _gather(pool, sequence.runs)[0]
    whole = replace(sequence, runs=(slice(0, len(rows)),), biases={})
    size = max(1, EXPANDED // (2 * len(rows) * query.shape[2]))
    outs = []
    for heads in (slice(first, first + size) for first in range(0, len(query), size)):
        its = replace(how, sinks=None if how.sinks is None else how.sinks[heads])
        outs.append(_attend_one(query[heads], latent.expanded(rows, heads), whole, its))
    return torch.cat(outs, dim=1)[..., : latent.value_dim]


def _attend(query: Tensor, pools: tuple[Tensor, Tensor], sequence: SequenceSlice, how: Scoring) -> Tensor:
    """Return one sequence's attention: queries [heads, tokens, head_dim] over its context -> [tokens, heads,
    head_dim]. Sinks and windows smaller than the context are supported on a CPU only.
    """
    if query.shape[1] <= FEW and query.device.type == "cpu":
        return _attend_few(query, pools, sequence, how)
    key, value = (_gather(pool, sequence.runs) for pool in pools)
    groups = len(query) // len(key)
    # Heads of one group share their KV: an expanded view gives SDPA its heads without a copy.
    grouped = query.reshape(len(key), groups, *query.shape[1:])
    key, value = (x[:, None].expand(-1, groups, -1, -1) for x in (key, value))
    is_causal = sequence.contiguous and how.window is None
    if how.sinks is not None or (is_causal and query.device.type == "cpu"):
        mask = None if is_causal else sequence.mask(how.window, query.dtype)
        out = _attend_in_parts(grouped, key, value, mask, how.scaling, how.sinks)
    elif is_causal:
        out = _attend_lower_right(grouped, key, value, how.scaling)
    else:
        out = _attend_masked(grouped, key, value, sequence, how)
    return out.flatten(0, 1).transpose(0, 1)


def _attend_masked(query: Tensor, key: Tensor, value: Tensor, sequence: SequenceSlice, how: Scoring) -> Tensor:
    """Return attention [kv_heads, group, tokens, head_dim] under a mask, some queries at a time over the keys that they
    see: one mask over a long prompt would be larger than its KV.
    """
    outs = []
    for rows, keys in sequence.pieces(how.window):
        mask, seen = sequence.mask(how.window, query.dtype, rows, keys), (key[:, :, keys], value[:, :, keys])
        outs.append(scaled_dot_product_attention(query[:, :, rows], *seen, attn_mask=mask, scale=how.scaling))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _attend_written_out(query: Tensor, pools: tuple[Tensor, Tensor], sequence: SequenceSlice, how: Scoring) -> Tensor:
    """Compute attention for which PyTorch has no fused kernel that is right: capped scores, and on a GPU sinks and
    windows. Under a window its memory-efficient kernel gave wrong numbers for whole prompts (torch 2.11 on an H200, 769
    to 1025 tokens, float32 and bf16), and read where it must not.
    """
    key, value = (_gather(pool, sequence.runs) for pool in pools)
    outs = []
    for rows, keys in sequence.pieces(how.window):
        mask = sequence.mask(how.window, torch.float32, rows, keys)
        seen = key[:, keys], value[:, keys]
        outs.append(attend_plainly(query[:, rows], *seen, mask, how.scaling, how.softcap, how.sinks))
    return torch.cat(outs, dim=1).transpose(0, 1)


def _attend_in_parts(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, sinks: Tensor | None = None
) -> Tensor:
    """Return attention [kv_heads, group, tokens, head_dim] beside sinks [heads], if there are any.

    Without a mask it is causal for a context's last tokens: the kernel masks the keys of those tokens, and all earlier
    ones are visible. An explicit mask would cost the work of all pairs.
    """
    before = 0 if mask is not None else key.shape[2] - query.shape[2]
    own = _flash(query, key[:, :, before:], value[:, :, before:], is_causal=mask is None, attn_mask=mask, scale=scaling)
    past = [_flash(query, key[:, :, :before], value[:, :, :before], scale=scaling)] if before else []
    outs, sums = map(list, zip(*past, own, strict=True))
    return _joined(outs, sums, None if sinks is None else sinks.view(*query.shape[:2], 1))


def _attend_lower_right(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Return causal attention on a GPU, where flash attention takes a mask of this shape, but no explicit one."""
    bias = causal_lower_right(query.shape[2], key.shape[2])
    return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)


def _gather(pool: Tensor, runs: Runs) -> Tensor:
    """Return runs of one layer's slots [slots, kv_heads, head_dim] as [kv_heads, tokens, head_dim]; a single run is a
    view.
    """
    pieces = [pool[run] for run in runs]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).transpose(0, 1)


def _attend_few(query: Tensor, pools: tuple[Tensor, Tensor], sequence: SequenceSlice, how: Scoring) -> Tensor:
    """Return the attention of a few queries over a long context. Reading it is the cost, so long runs are read in
    place, once for all heads of a group, and the parts' results are joined by their softmax sums.
    """
    kv_heads, head_dim = pools[0].shape[1:]
    grouped = query.reshape(1, kv_heads, -1, head_dim)  # the heads of a group, and in each its queries
    parts = sequence.parts()
    biases: Sequence[Bias | None] = [None] * len(parts)
    if query.shape[1] > 1 or how.window is not None:
        biases = sequence.part_biases(how.window, len(query) // kv_heads, query.dtype)
    outs, sums = [], []
    for part, bias in zip(parts, biases, strict=True):
        runs = tuple(sequence.runs[i] for i in part)
        key, value = (_gather(pool, runs)[None] for pool in pools)
        out, logsumexp = _flash(grouped, key, value, attn_mask=bias and bias.scores, scale=how.scaling)
        outs.append(out)
        # For a query that sees no key of a part the kernel returns 0, which would count as a weight.
        sums.append(logsumexp if bias is None else logsumexp + bias.seen)
    sink = None if how.sinks is None else how.sinks.repeat_interleave(query.shape[1]).view(1, kv_heads, -1)
    out = _joined(outs, sums, sink)
    return out.view(len(query), -1, head_dim).transpose(0, 1)


def _joined(outs: list[Tensor], sums: list[Tensor], sink: Tensor | None) -> Tensor:
    """Return the attention over all parts [1, heads, queries, head_dim], joined from each part's attention and the
    logarithms of its softmax sums. A `sink` is one more of those sums, with nothing to attend to.
    """
    if sink is None and len(outs) == 1:
        return outs[0]
    if sink is not None:
        sums = [*sums, sink.to(sums[0].dtype).expand_as(sums[0])]
    weights = torch.stack(sums).softmax(0)[: len(outs)]
    return torch.stack(outs).mul_(weights[..., None]).sum(0)


AttentionInterface.register(NAME, paged_attention)
