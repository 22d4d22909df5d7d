"""A choice between experts adds to the error of the first token: the last token, computed from translated KV, goes to
other experts than in dense prefill. The figures of `docs/limits.md` are of more models (tag `studies-0.1`).
"""

from __future__ import annotations

import pytest

from tests.engine.local.model.expert_choice import Study
from tests.engine.local.model.test_architectures import errors
from tests.marks import on_push

MODELS = 4
BEYOND = "DeepSeek-V2, MLA"
"""Where the choice of the last token is a small part of the difference"""
MIXTURES = [
    "DeepSeek-V3 and Kimi K2, MLA", "DeepSeek-V2, MLA", "GLM-4.7-Flash, MLA", "Qwen3 MoE", "gpt-oss, attention sinks",
    "MiMo V2, sinks and narrow values",
]  # fmt: skip


@pytest.mark.parametrize("name", on_push(MIXTURES, {"DeepSeek-V2, MLA", "Qwen3 MoE"}))
def test_with_the_experts_of_dense_prefill_the_error_is_smaller(name: str) -> None:
    own, forced = Study(name).run(MODELS), Study(name, forced=True).run(MODELS)
    _, as_token = errors("Llama", num_key_value_heads=2 if name in ("Qwen3 MoE", "gpt-oss, attention sinks") else 4)
    print(f"{name}: {own.mean:.2f}, forced {forced.mean:.2f}; Llama {as_token:.2f}")
    assert any(own.last)
    assert not any(forced.computed)
    assert forced.mean < own.mean
    assert forced.mean < (2.6 if name == BEYOND else 2.2) * as_token


def test_what_flips_is_mostly_the_last_token() -> None:
    found = Study(MIXTURES[0]).run(MODELS)
    assert sum(found.last) > len(found.last) / 3
    assert sum(found.computed) < len(found.computed) / 20


def test_a_model_without_experts_has_nothing_to_choose() -> None:
    found = Study("Llama", {"num_key_value_heads": 4}).run(2)
    assert (found.computed, any(found.last)) == ([], False)


def test_all_translated_tokens_from_dense_prefill_leave_no_error() -> None:
    """The lab itself: with the KV of dense prefill everywhere no choice differs."""
    found = Study(MIXTURES[0], share=1.0).run(2)
    assert found.mean < 1e-6
    assert not any(found.computed)
