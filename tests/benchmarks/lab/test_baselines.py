"""Rotation only and the ablations of Table 5, against KV that plain Transformers computes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers import DynamicCache

from benchmarks.lab.methods import Ablation, NoAnchors
from kedge.engine.local.components import EngineComponents
from kedge.kv.segment import KVSegment
from kedge.reuse.layout import layout, template_tokens
from kedge.types import GenerateRequest, SampleId, Source, Tokens
from tests.benchmarks.driver import ComponentsDriver
from tests.engine.local.test_translation import request, tokens

HISTORY = (60, 61, 62)
ASKED = request(tokens(50, 30), tokens(51, 12))
PHI, PREFIX, HINT, LAST = slice(20, 50), slice(50, 59), slice(59, 71), slice(71, 75)
"""Placeholder, prefix segment, placeholder, and what of the last prefix segment is not computed"""


def transformers_kv(driver: ComponentsDriver, ids: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (rotated to 0 …) and values [layers, tokens, kv_heads, head_dim] of a plain prefill."""
    cache, model = DynamicCache(), driver.runner.model
    model.set_attn_implementation("eager")
    with torch.no_grad():
        model(torch.tensor([ids]), past_key_values=cache)
    model.set_attn_implementation("kedge")
    return tuple(
        torch.stack([getattr(one, part)[0] for one in cache.layers]).transpose(1, 2) for part in ("keys", "values")
    )


def served(
    components: EngineComponents, asked: GenerateRequest = ASKED
) -> tuple[ComponentsDriver, GenerateRequest, KVSegment]:
    """`asked` after others that taught the pools; its KV with keys as they lie in the storage, rotated."""
    driver = ComponentsDriver(components)
    for seed in HISTORY:
        driver.serve(request(tokens(seed, 30), tokens(seed + 5, 12)))
    driver.serve(request(asked.segments[1].tokens, asked.segments[3].tokens, agent="critic"))  # leaves base KV behind
    sequence, kv = driver.serve(asked)
    assert sequence.plan.translates
    keys = torch.empty_like(kv.keys)
    driver.runner.rotary.rotate(kv.keys, slice(0, kv.tokens), out=keys)
    return driver, sequence, KVSegment(keys, kv.values)


def base_parts(driver: ComponentsDriver, asked: GenerateRequest) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Base KV of every segment as Transformers computes it, rotated as there."""
    parts, start = {}, 0
    keys, values = transformers_kv(driver, template_tokens(asked))
    for placed in layout(asked):
        segment = placed.segment
        size = len(segment.placeholder_text) if segment.is_placeholder else len(placed)
        if segment.is_placeholder:
            lead = len(segment.base_context)
            own = transformers_kv(driver, segment.base_context + segment.tokens)
            parts[segment.name] = tuple(part[:, lead:] for part in own)
        else:
            parts[segment.name] = keys[:, start : start + size], values[:, start : start + size]
        start += size
    return parts


def test_rotation_only_is_base_kv_at_its_new_place_from_the_second_request_on() -> None:
    driver, sequence, kv = served(EngineComponents(NoAnchors, Ablation(values=False, prefixes=False)))
    assert {span.source for span in sequence.plan.spans} == {Source.TRANSLATED, Source.COMPUTED}
    assert sequence.receipt().translated == 30 + 9 + 12 + 4
    for name, at in {"user_question": PHI, "condition_solver_current": HINT, "p1": PREFIX}.items():
        keys, values = base_parts(driver, ASKED)[name]
        start = {"user_question": 3, "condition_solver_current": 3, "p1": 26}[name]
        moved = driver.runner.rotary.unrotate(keys, slice(start, start + keys.shape[1]))
        placed = torch.empty_like(moved)
        driver.runner.rotary.rotate(moved, at, out=placed)
        torch.testing.assert_close(kv.values[:, at], values, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(kv.keys[:, at], placed, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("rotation", "values", "prefixes"), list(product([True, False], repeat=3)))
def test_every_row_of_table_5(rotation: bool, values: bool, prefixes: bool) -> None:
    driver, _, full = served(EngineComponents())
    _, _, kv = served(EngineComponents(assembler=Ablation(rotation, values, prefixes)))
    base = base_parts(driver, ASKED)
    for name, at, on in (
        ("user_question", PHI, values),
        ("condition_solver_current", HINT, values),
        ("p1", PREFIX, prefixes),
    ):
        wanted = full.values[:, at] if on else base[name][1]
        torch.testing.assert_close(kv.values[:, at], wanted, atol=1e-3, rtol=1e-3)
        if rotation and on:
            torch.testing.assert_close(kv.keys[:, at], full.keys[:, at], atol=1e-5, rtol=1e-5)
        elif not rotation and not on:  # as Transformers left them: nobody has turned them
            torch.testing.assert_close(kv.keys[:, at], base[name][0], atol=1e-4, rtol=1e-4)
        else:
            assert float((kv.keys[:, at] - full.keys[:, at])[1:].norm() / full.keys[:, at][1:].norm()) > 0.05


def test_an_answer_that_is_not_rotated_stays_where_it_was_decoded() -> None:
    driver = ComponentsDriver(EngineComponents(NoAnchors, Ablation(rotation=False, values=False, prefixes=False)))
    producer = replace(request(tokens(70, 30), agent="critic"), produces=SampleId.parse("condition_solver@0"))
    said, _ = driver.serve(producer)
    answer = tuple(said.response)
    for seed in (70, 71):
        driver.serve(request(tokens(seed, 30), tokens(seed, 6)))
    asked = request(tokens(70, 30), answer)
    sequence, kv = driver.serve(asked)
    at = slice(59, 59 + len(answer))
    assert all(s.source is Source.TRANSLATED for s in sequence.plan.spans if s.start == at.start)
    keys, _ = transformers_kv(driver, (*producer.tokens, *answer))
    raw = torch.empty_like(kv.keys)
    driver.runner.rotary.rotate(kv.keys, slice(0, kv.tokens), out=raw)
    torch.testing.assert_close(raw[:, at], keys[:, producer.prompt_tokens :], atol=1e-4, rtol=1e-4)


def test_all_three_steps_are_kvcomm_itself() -> None:
    _, _, full = served(EngineComponents())
    _, _, same = served(EngineComponents(assembler=Ablation()))
    assert torch.equal(full.keys, same.keys)
    assert torch.equal(full.values, same.values)
