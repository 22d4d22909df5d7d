"""Which kinds of speculative decoding translation goes along with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from transformers import DeepseekV3Config, LlamaConfig

from kedge.integrations.vllm.plugin.feature_checks import speculation_refusal

MODEL = LlamaConfig()


def config(method: str | None, head: Any = MODEL, lookahead: int = 0) -> Any:
    draft = SimpleNamespace(hf_text_config=head)
    drafts = None if method is None else SimpleNamespace(method=method, draft_model_config=draft)
    return SimpleNamespace(
        speculative_config=drafts,
        model_config=SimpleNamespace(hf_text_config=MODEL),
        num_prefill_lookahead_tokens=lookahead,
    )


@pytest.mark.parametrize("method", [None, "ngram", "ngram_gpu", "suffix", "medusa", "eagle", "eagle3", "mtp"])
def test_drafts_that_change_nothing_are_accepted(method: str | None) -> None:
    assert speculation_refusal(config(method)) is None


@pytest.mark.parametrize("method", ["draft_model", "dflash", "dspark", "custom_class", "invented"])
def test_kv_of_other_drafts_is_not_translated(method: str) -> None:
    refusal = speculation_refusal(config(method))
    assert refusal == f"speculative decoding by {method}: the draft's KV is not translated"


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 5.0}), "rotates keys in another way"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "dynamic RoPE"),
        (DeepseekV3Config(), "MLA"),
    ],
)
def test_a_head_unlike_the_model_is_not_translated(head: Any, why: str) -> None:
    refusal = speculation_refusal(config("eagle", head))
    assert refusal and why in refusal


def test_several_heads_compute_a_prompts_end_again() -> None:
    refusal = speculation_refusal(config("mtp", lookahead=3))
    assert refusal and "by 3 heads" in refusal
