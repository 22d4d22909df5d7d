"""Speculative decoding of models with several KV cache groups: answers are stock's, also over KV from the host."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.integrations.vllm.conftest import SHAPE, driver, receipt  # noqa: E402
from tests.integrations.vllm.test_cache_groups import (  # noqa: E402
    LAYERS,
    check_rest,
    conversation,
    cycle,
    gemma2,
    gemma3,
    gemma4,
    gpt_oss,
)
from tests.integrations.vllm.test_cache_groups import MODELS as UNDRAFTED  # noqa: E402
from tests.integrations.vllm.test_speculation import NGRAMS, drafted, save_eagle_head  # noqa: E402
from tests.integrations.vllm.test_translation import VALUES, hints, tokens  # noqa: E402

NORMS = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")


def exaone_moe() -> Any:
    from transformers import ExaoneMoeConfig, ExaoneMoeForCausalLM

    shape = {**SHAPE, **LAYERS, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return ExaoneMoeForCausalLM(ExaoneMoeConfig(**shape, **experts, sliding_window=64))


def save_exaone_head(folder: Path) -> None:
    """Add a random head for the token after the next (MTP) to a saved model: a layer with a window, as K-EXAONE has."""
    import torch
    from safetensors.torch import load_file, save_file

    weights, hidden = load_file(folder / "model.safetensors"), SHAPE["hidden_size"]
    first = {name: weight for name, weight in weights.items() if name.startswith("model.layers.0.")}
    weights |= {name.replace("model.", "mtp.", 1): weight.clone() for name, weight in first.items()}
    weights |= {f"mtp.{name}.weight": torch.ones(hidden) for name in NORMS}
    weights["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden) * 0.2
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    head = {"num_nextn_predict_layers": 1, "mtp_layer_types": ["sliding_attention"], "mtp_sliding_windows": [64]}
    windows = [64 if kind == "sliding_attention" else 0 for kind in config["layer_types"]]
    (folder / "config.json").write_text(json.dumps({**config, **head, "sliding_windows": windows}))


SIZES: dict[Callable[[], Any], dict[str, Any]] = {**UNDRAFTED, exaone_moe: {"block": 32, "max_model_len": 384}}
MODELS: dict[Callable[[], Any], dict[str, int]] = {
    gemma2: {"ngram": 36},  # vLLM 0.32 has no output layer of it to give to a head
    gemma3: {"ngram": 48, "eagle": 48},
    gpt_oss: {"ngram": 36, "eagle": 44},
    gemma4: {"ngram": 120, "eagle": 160},
    exaone_moe: {"ngram": 36, "mtp": 44},
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
        if build is exaone_moe:
            save_exaone_head(folder)
        with driver(folder, plugged=False, **size_of(build)) as plain:
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
    elif method == "mtp":
        drafts = {"method": "mtp", "num_speculative_tokens": 1}
    with driver(model, extra={"tiers": {"host_memory": "400 blocks"}}, speculative_config=drafts, **size) as built:
        assert len(built.scheduler.kv_cache_config.kv_cache_groups) > 1
        assert cycle(built, block) == agents
        assert built.side.totals().get("blocks_loaded"), "fixed prompts come back from the host"
        assert conversation(built, block) == sessions
        assert built.side.totals().get("failed_copies", 0) == 0
        assert drafted(built) > 0
        output = built.ask(tokens(VALUES[0]), kedge=hints(VALUES[0]))
        assert "KV cache groups" in receipt(output)["misses"][0]["reason"]
        check_rest(built)
