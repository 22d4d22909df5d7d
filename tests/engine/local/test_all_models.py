"""Every causal language model of the installed Transformers, tiny and with random weights: it is right, or refused."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from kedge.engine.local.model.loading import require_buildable
from kedge.engine.local.model.replica import random_model, small_config
from kedge.errors import UnsupportedModel
from kedge.types import Tokens
from tests.engine.local.conftest import engine_of
from tests.engine.local.test_engine import prompt, request
from tests.marks import on_push

KINDS = {kind.model_type: kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING}
SERVED = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "mistral", "phi3", "granite", "olmo2", "cohere", "glm4",
    "smollm3", "gpt_neox", "gemma3_text", "gemma4_text", "olmo3", "gpt_oss", "mimo_v2_flash", "deepseek_v3",
    "glm4_moe_lite", "minicpm3", "longcat_flash",
)  # fmt: skip
"""Families that must not be refused"""
ON_PUSH = (
    *SERVED, "apertus", "arcee", "bamba", "bert", "bloom", "codegen", "exaone4", "falcon", "gpt2", "gptj", "jetmoe",
    "lfm2", "llama4_text", "mamba", "mixtral", "mpt", "nemotron", "opt", "phi", "stablelm",
)  # fmt: skip
"""42 families, some of which are refused"""
MOST_UNBUILT = 20
FEWEST_RIGHT = 65
ANSWER = 8
CLOSE = 1e-3
"""By how much of the logits' range a token may miss the largest one: rounding decides between such"""

COUNTED = "5.23"
"""The minor of Transformers of which `docs/limits.md` has the counts"""
LIMITS = Path(__file__).parents[3] / "docs" / "limits.md"

STEMS = {0: prompt(0, 40), 1: prompt(1, 21)}
PROMPTS = [STEMS[0], STEMS[1], STEMS[0] + prompt(2, 9), STEMS[0][:32] + prompt(3, 30)]
"""Longer than the small models' window; the last two begin as the first, and find its KV"""


def tiny_config(kind: str) -> PretrainedConfig | None:
    """A small config, or None where the sizes of this family do not go together once they are cut down."""
    try:
        return small_config(KINDS[kind]())
    except Exception:  # each family checks its sizes in its own way
        return None


@torch.no_grad()
def missed(model: PreTrainedModel, tokens: Tokens, answer: Tokens) -> list[int]:
    """Which tokens of an answer are not those of greedy decoding by Transformers' own eager attention."""
    logits = model(input_ids=torch.tensor([tokens + answer]), use_cache=False).logits[0, len(tokens) - 1 : -1]
    best, lowest = logits.amax(-1), logits.amin(-1)
    taken = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return ((best - taken) > CLOSE * (best - lowest)).nonzero().flatten().tolist()


def answers(model: PreTrainedModel) -> tuple[list[Tokens], int]:
    """What the engine answers to all prompts, and how many tokens of them it took from its cache."""
    with engine_of(model, max_batch_tokens=32, kv_memory="64 blocks") as engine:
        first = [stream.result(60) for stream in [engine.submit(request(p, max_tokens=ANSWER)) for p in PROMPTS[:2]]]
        later = [stream.result(60) for stream in [engine.submit(request(p, max_tokens=ANSWER)) for p in PROMPTS[2:]]]
    return [done.tokens for done in first + later], sum(done.receipt.exact for done in later)


def require_right(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModel`, or serve the model and compare what it answers."""
    given, reused = answers(model)
    assert reused >= 64
    model.set_attn_implementation("eager")
    assert [missed(model, p, a) for p, a in zip(PROMPTS, given, strict=True)] == [[]] * len(PROMPTS)


@cache
def outcome(kind: str) -> str:
    """`right` or `refused`; `unbuilt` where there is no tiny model of this kind. Anything else raises."""
    if (config := tiny_config(kind)) is None:
        return "unbuilt"
    try:
        require_buildable(config)
        require_right(random_model(config))
    except UnsupportedModel as error:
        assert error.why
        return "refused"
    return "right"


@pytest.mark.parametrize("kind", on_push(sorted(KINDS), ON_PUSH))
def test_every_model_is_right_or_refused(kind: str) -> None:
    assert outcome(kind) == "right" or kind not in SERVED


@pytest.mark.slow
def test_so_many_were_tried_that_it_means_something_and_the_limits_have_these_counts() -> None:
    outcomes = {kind: outcome(kind) for kind in KINDS}
    counts = Counter(outcomes.values())
    assert counts["unbuilt"] <= MOST_UNBUILT, [kind for kind, was in outcomes.items() if was == "unbuilt"]
    assert counts["right"] >= FEWEST_RIGHT
    said = (
        f"Of the {len(KINDS)} causal models of Transformers {COUNTED}, each tiny and with random weights, "
        f"{counts['right']} run correctly and {counts['refused']} are refused; "
        f"{counts['unbuilt']} cannot be built tiny."
    )
    is_counted = transformers.__version__.startswith(f"{COUNTED}.")
    assert said in " ".join(LIMITS.read_text(encoding="utf-8").split()) or not is_counted


def test_the_comparison_sees_an_answer_that_is_wrong() -> None:
    model = random_model(small_config(KINDS["llama"]()))
    given, _ = answers(model)
    model.set_attn_implementation("eager")
    wrong = (*given[0][:3], (given[0][3] + 1) % 264, *given[0][4:])
    assert missed(model, PROMPTS[0], given[0]) == []
    assert 3 in missed(model, PROMPTS[0], wrong)
