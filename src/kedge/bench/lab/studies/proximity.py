"""KVCOMM, figure 4: tokens with similar embeddings have similar KV, and similar offsets between two contexts."""

from __future__ import annotations

import random
from itertools import islice

import torch
from torch import Tensor

from kedge.bench.lab.studies.contexts import Contexts
from kedge.bench.lab.studies.study import Note, Plot, Row, Study, StudySettings
from kedge.kv.segment import KVSegment
from kedge.types import Tokens
from kedge.workloads.catalog import load

_TOKENS, _QUICK_TOKENS = 4000, 200
_PAIRS = 300
_BINS = ("near", "mid", "far")


def measure(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for every layer and bin: L2 distances over their mean in the layer, and Spearman's coefficient over
    all pairs. Layer 0 has no offsets.
    """
    with Contexts(settings) as contexts:
        rng = random.Random(seed)
        known = [token for token in range(len(contexts.embeddings)) if token not in contexts.special]
        tokens = rng.sample(known, min(_QUICK_TOKENS if settings.quick else _TOKENS, len(known)))
        left, right, distance = nearest_pairs(contexts.embeddings, tokens)
        _, questions = load(settings.task, settings.dataset, seed)
        texts = [contexts.encode(question.text) for question in islice(questions, 2)]
        used = sorted({*left, *right})
        note(f"{len(used)} tokens in two contexts")
        one, two = (_rows(contexts, text, used) for text in texts)
    place = {token: i for i, token in enumerate(used)}
    pairs = [place[token] for token in left], [place[token] for token in right]
    columns = {
        "keys": _distances(one.keys, pairs),
        "values": _distances(one.values, pairs),
        "key_offsets": _distances(two.keys - one.keys, pairs),
        "value_offsets": _distances(two.values - one.values, pairs),
    }
    return [row for layer in range(one.layers) for row in _layer(layer, distance, columns)]


def nearest_pairs(embeddings: Tensor, tokens: list[int]) -> tuple[list[int], list[int], Tensor]:
    """Return the `_PAIRS` pairs of nearest embeddings, nearest first, with their distances (float32)."""
    chosen = torch.tensor(tokens)
    between = torch.cdist(embeddings[chosen], embeddings[chosen])
    a, b = torch.triu_indices(len(chosen), len(chosen), offset=1)
    distance, order = between[a, b].sort()
    first = order[:_PAIRS]
    return chosen[a[first]].tolist(), chosen[b[first]].tolist(), distance[:_PAIRS]


def spearman(a: Tensor, b: Tensor) -> float | None:
    """Return the rank correlation (equal values share their mean rank); None where one side is constant."""
    ranks = torch.stack([_ranks(a), _ranks(b)])
    if bool((ranks.std(1) == 0).any()):
        return None
    return float(torch.corrcoef(ranks)[0, 1])


def _ranks(values: Tensor) -> Tensor:
    _, place, count = values.unique(return_inverse=True, return_counts=True)
    last = count.cumsum(0).double()
    return (last - (count - 1) / 2)[place]


def _rows(contexts: Contexts, before: Tokens, tokens: list[int]) -> KVSegment:
    parts = [contexts.kv(before, (token,)) for token in tokens]
    return KVSegment(torch.cat([p.keys for p in parts], 1), torch.cat([p.values for p in parts], 1))


def _distances(kv: Tensor, pairs: tuple[list[int], list[int]]) -> Tensor:
    """Return L2 distances, float32 [layers, pairs], for KV [layers, tokens, heads, dim]."""
    return (kv[:, pairs[0]] - kv[:, pairs[1]]).flatten(2).norm(dim=2)


def _layer(layer: int, embedding: Tensor, columns: dict[str, Tensor]) -> list[Row]:
    rows: list[Row] = []
    for i, name in enumerate(_BINS):
        row: Row = {"layer": layer, "bin": name}
        for column, by_layer in columns.items():
            distance = by_layer[layer] / by_layer[layer].mean().clamp_min(1e-6)
            row[column] = float(distance.tensor_split(len(_BINS))[i].mean())
            row[f"{column}_spearman"] = spearman(embedding, by_layer[layer])
        rows.append(row)
    return rows


STUDY = Study(
    "proximity",
    "Near tokens have near KV and near offsets",
    "Figure 4: 4000 tokens, the 300 pairs of nearest embeddings in three bins of equal size; distances of KV and of "
    "offsets grow from near to far in all layers, with positive Spearman coefficients (plots).",
    measure,
    Plot("layer", ("keys", "values", "key_offsets", "value_offsets"), "bin", "lines"),
)
