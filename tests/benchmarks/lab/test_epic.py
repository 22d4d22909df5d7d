"""EPIC against a twin that runs all tokens through all layers and keeps the KV of each chunk's first tokens only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.lab.methods import epic
from kedge.errors import ConfigError
from kedge.kv.segment import KVSegment
from kedge.types import ReuseMode, Source
from tests.benchmarks.driver import ComponentsDriver
from tests.benchmarks.lab.twins import moved, plain_prefill, recomputed
from tests.engine.local.test_translation import request, tokens

ASKED = request(tokens(50, 30), tokens(51, 12))
CHUNKS = {"user_question": range(20, 50), "p1": range(50, 59), "condition": range(59, 71), "p2": range(71, 76)}


def served(first: int):  # noqa: ANN201
    method = epic(first)
    driver = ComponentsDriver(method.components, planner=method.config({}, {}).planner)
    driver.serve(request(tokens(60, 30), tokens(61, 12)))
    driver.serve(request(tokens(50, 30), tokens(51, 12), agent="critic"))  # leaves base KV behind
    return (driver, *driver.serve(ASKED))


def base_kv(driver: ComponentsDriver) -> KVSegment:
    """KV of the whole prompt whose chunks Transformers prefilled one by one, keys rotated to their places here."""
    at = {segment.name: segment for segment in ASKED.segments}
    context, name = at["user_question"].base_context, at["user_question"].placeholder_text
    parts = [at["p0"].tokens, name, at["p1"].tokens, name, at["p2"].tokens]
    template = tuple(token for part in parts for token in part)
    sources = {
        "user_question": (context + at["user_question"].tokens, len(context)),
        "p1": (template, 20 + len(name)),
        "condition": (context + at["condition_solver_current"].tokens, len(context)),
        "p2": (template, 20 + len(name) + 9 + len(name)),
    }
    keys, values, _ = plain_prefill(driver, ASKED.tokens)
    for chunk, positions in CHUNKS.items():
        ids, start = sources[chunk]
        own_keys, own_values, _ = plain_prefill(driver, ids)
        here = slice(start, start + len(positions))
        placed = moved(
            driver,
            KVSegment(driver.runner.rotary.unrotate(own_keys[:, here], here), own_values[:, here]),
            positions.start,
        )
        keys[:, positions], values[:, positions] = placed.keys, placed.values
    return KVSegment(keys, values)


@pytest.mark.parametrize("first", [0, 1, 4, 9, 16])
def test_the_first_tokens_of_each_chunk_are_recomputed_and_nothing_else(first: int) -> None:
    driver, sequence, kv = served(first)
    expected = [p for chunk in CHUNKS.values() for p in chunk[:first]] + [75]
    assert [p for p in sequence.plan.computed if p >= 20] == sorted(set(expected))
    computed = set(sequence.plan.computed)
    keys, values = recomputed(driver, ASKED.tokens, base_kv(driver), computed)
    got = moved(driver, kv, 0)
    torch.testing.assert_close(got.keys, keys, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(got.values, values, atol=1e-4, rtol=1e-3)
    assert sequence.receipt().tokens(Source.TRANSLATED) == 76 - len(computed)


def test_chunks_that_are_recomputed_as_a_whole_are_dense_prefill() -> None:
    driver, sequence, kv = served(30)
    assert sequence.plan.computed == list(range(76))
    _, dense = driver.serve(replace(ASKED, reuse=ReuseMode.OFF, request_id="dense"))
    torch.testing.assert_close(kv.values, dense.values, atol=1e-4, rtol=1e-4)


def test_more_tokens_are_nearer_to_dense_prefill() -> None:
    errors = []
    for first in (0, 4, 16):
        driver, _, kv = served(first)
        _, dense = driver.serve(replace(ASKED, reuse=ReuseMode.OFF, request_id="dense"))
        errors.append(float((kv.values - dense.values).norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[2] < 0.9 * errors[0]


def test_a_negative_number_is_named() -> None:
    with pytest.raises(ConfigError, match="epic.first"):
        epic(-1)
