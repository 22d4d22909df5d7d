"""Speculative decoding of models with several KV cache groups: answers are stock's, also over KV from the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.integrations.vllm.conftest import driver, receipt, skipped_where_vllm_fails  # noqa: E402
from tests.integrations.vllm.test_cache_groups import (  # noqa: E402
    BFLOAT16_SINKS,
    check_rest,
    conversation,
    cycle,
    gemma2,
    gemma3,
    gemma4,
    gpt_oss,
)
from tests.integrations.vllm.test_cache_groups import MODELS as SIZES  # noqa: E402
from tests.integrations.vllm.test_speculation import NGRAMS, drafted, save_eagle_head  # noqa: E402
from tests.integrations.vllm.test_translation import VALUES, hints, tokens  # noqa: E402

pytestmark = pytest.mark.usefixtures("drafting")
MODELS: dict[Callable[[], Any], dict[str, int]] = {
    gemma2: {"ngram": 36},  # vLLM 0.32 has no output layer of it to give to a head
    gemma3: {"ngram": 48, "eagle": 48},
    gpt_oss: {"ngram": 36, "eagle": 44},
    gemma4: {"ngram": 120, "eagle": 160},
}
"""With the blocks of the device, by what drafts: about half of what the agents' prompts need"""
CASES = [(build, method) for build, blocks in MODELS.items() for method in blocks]
Answers = tuple[Path, list[list[int]], list[list[int]]]


def size_of(build: Callable[[], Any]) -> dict[str, Any]:
    return {"max_model_len": SIZES[build]["max_model_len"], "enable_prefix_caching": True}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[], Any]], Answers]:
    """A random model, and stock's answers without drafts."""

    @cache
    def of(build: Callable[[], Any]) -> Answers:
        import torch

        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp(build.__name__)
        build().eval().save_pretrained(folder)
        with driver(folder, plugged=False, **size_of(build)) as plain, skipped_where_vllm_fails(*BFLOAT16_SINKS):
            return folder, cycle(plain, SIZES[build]["block"]), conversation(plain, SIZES[build]["block"])

    return of


@pytest.mark.parametrize(("build", "method"), CASES, ids=[f"{build.__name__}-{method}" for build, method in CASES])
def test_answers_are_stocks(
    answers: Callable[[Callable[[], Any]], Answers], build: Callable[[], Any], method: str, tmp_path: Path
) -> None:
    (model, agents, sessions), block, drafts = answers(build), SIZES[build]["block"], NGRAMS
    size = {**size_of(build), "num_gpu_blocks_override": MODELS[build][method]}
    if method == "eagle":
        drafts = {"method": "eagle", "model": str(save_eagle_head(tmp_path)), "num_speculative_tokens": 2}
    with driver(model, extra={"tiers": {"host_blocks": 400}}, speculative_config=drafts, **size) as built:
        assert len(built.scheduler.kv_cache_config.kv_cache_groups) > 1
        assert cycle(built, block) == agents
        assert built.side.totals()["blocks_loaded"] > 0, "fixed prompts come back from the host"
        assert conversation(built, block) == sessions
        assert built.side.totals().get("failed_copies", 0) == 0
        assert drafted(built) > 0
        output = built.ask(tokens(VALUES[0]), kedge=hints(VALUES[0]))
        assert "KV cache groups" in receipt(output)["misses"][0]["reason"]
        check_rest(built)
