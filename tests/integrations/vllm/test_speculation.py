"""Speculative decoding beside the plug-in: answers are stock's, and translated ones those without drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integrations.vllm import test_cache_groups as groups
from tests.integrations.vllm.conftest import SHAPE, Driver, driver, receipt
from tests.integrations.vllm.lane_prompts import ONE, OTHER, ask, lane_engine, tokens
from tests.integrations.vllm.test_cache_groups import LAYERS, MODELS, gemma2, gemma3, gemma4, gpt_oss
from tests.integrations.vllm.test_company import SIZE
from tests.integrations.vllm.test_translation import VALUES, hints
from tests.integrations.vllm.test_translation import tokens as with_value

NGRAMS: dict[str, Any] = {
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
}  # fmt: skip
COUNT = 24


def save_eagle_head(folder: Path, **other: Any) -> Path:
    """A random head of EAGLE's for the tiny Llama: a layer behind the model's. `other` changes its config."""
    shape = {**SHAPE, "num_hidden_layers": 1, "model_type": "llama", "architectures": ["LlamaForCausalLM"], **other}
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads = shape["num_attention_heads"] * shape["head_dim"]
    kv_heads = shape["num_key_value_heads"] * shape["head_dim"]
    sizes = {
        "fc": (hidden, 2 * hidden), "q": (heads, hidden), "k": (kv_heads, hidden), "v": (kv_heads, hidden),
        "o": (hidden, heads), "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner),
    }  # fmt: skip
    random = torch.Generator().manual_seed(1)
    drawn = {name: torch.randn(size, generator=random) * 0.2 for name, size in sizes.items()}
    weights = {"fc.weight": drawn.pop("fc"), "layers.0.post_attention_layernorm.weight": torch.ones(hidden)}
    for name, weight in drawn.items():
        part = "self_attn" if len(name) == 1 else "mlp"
        weights[f"layers.0.{part}.{name}_proj.weight"] = weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**shape, "dtype": "float32"}))
    return folder


def save_glm4(folder: Path) -> Path:
    """A random GLM-4 MoE of three layers with a head for the token after the next (MTP), as its fourth layer."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    torch.manual_seed(0)
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32}
    shape = {**SHAPE, **experts, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "pad_token_id": 0}
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**shape, partial_rotary_factor=0.5, num_nextn_predict_layers=1)).eval()
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    last = {name: weight for name, weight in weights.items() if name.startswith("model.layers.2.")}
    weights |= {name.replace("layers.2.", "layers.3."): weight.clone() for name, weight in last.items()}
    hidden = SHAPE["hidden_size"]
    head = {name: torch.ones(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    head |= {"eh_proj": torch.randn(hidden, 2 * hidden) * 0.2, "shared_head.head": weights["lm_head.weight"].clone()}
    head |= {"embed_tokens": weights["model.embed_tokens.weight"].clone()}
    weights |= {f"model.layers.3.{name}.weight": weight for name, weight in head.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def of_answers(model: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Answers without drafts: stock's to the cycle, and translated ones."""
    with driver(model, plugged=False, **SIZE) as plain:
        answers = plain.cycle()
    with lane_engine(model, asynchronous=False) as taught:
        return answers, translated(taught)


def translated(taught: Driver) -> list[list[int]]:
    """Answers to prompts with values from which nothing was learned."""
    answers = []
    for number in (ONE, OTHER):
        output = ask(taught, number, COUNT)
        assert receipt(output)["tokens"]["translated"] > len(tokens(number)) // 2
        answers.append(list(output.outputs[0].token_ids))
    return answers


Undrafted = tuple[list[list[int]], list[list[int]]]


@pytest.fixture(scope="module")
def of_llama(tiny_llama: Path) -> Undrafted:
    return of_answers(tiny_llama)


@pytest.fixture(scope="module", params=["ngram", "eagle", "mtp"])
def case(
    request: pytest.FixtureRequest, tiny_llama: Path, of_llama: Undrafted, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any], Undrafted]:
    """A model, how it drafts, and its answers without drafts."""
    if request.param == "ngram":
        return tiny_llama, NGRAMS, of_llama
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "eagle":
        drafts = {"method": "eagle", "model": str(save_eagle_head(folder)), "num_speculative_tokens": 3}
        return tiny_llama, drafts, of_llama
    return save_glm4(folder), {"method": "mtp", "num_speculative_tokens": 1}, of_answers(folder)


def drafted(engine: Driver) -> int:
    """How many tokens were proposed since the engine began."""
    metrics = {one.name: one for one in engine.llm.get_metrics()}
    return metrics["vllm:spec_decode_num_draft_tokens"].value


def test_answers_are_stocks(case: tuple[Path, dict[str, Any], Undrafted]) -> None:
    """Over KV that comes back from the host, that of the head included."""
    model, drafts, undrafted = case
    with driver(model, extra={"tiers": {"host_memory": "60 blocks"}}, speculative_config=drafts, **SIZE) as built:
        assert built.cycle() == undrafted[0]
        assert built.side.totals()["blocks_loaded"] > 0 and drafted(built) > 0
        assert built.pool.get_num_free_blocks() == built.pool.num_gpu_blocks - 1


def test_translated_answers_are_those_without_drafts(case: tuple[Path, dict[str, Any], Undrafted]) -> None:
    model, drafts, undrafted = case
    with lane_engine(model, asynchronous=False, speculative_config=drafts) as taught:
        assert translated(taught) == undrafted[1]
        assert drafted(taught) > 0
        layers = taught.worker._learner.pages.empty.keys.shape[0]
        assert layers == 3 + (drafts["method"] != "ngram"), "a head's layer is translated as the model's own"
        assert taught.pool.get_num_free_blocks() == taught.pool.num_gpu_blocks - 1


def test_a_head_that_rotates_in_another_way_is_not_translated(tiny_llama: Path, tmp_path: Path) -> None:
    head = save_eagle_head(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    drafts = {"method": "eagle", "model": str(head), "num_speculative_tokens": 2}
    with driver(tiny_llama, speculative_config=drafts) as built:
        output = ask(built, ONE)
        assert "rotates keys in another way" in receipt(output)["misses"][0]["reason"]


# models with several KV cache groups ----------------------------------------------------------------------------------

NORMS = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")


def exaone_moe() -> Any:
    from transformers import ExaoneMoeConfig, ExaoneMoeForCausalLM

    shape = {**SHAPE, **LAYERS, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return ExaoneMoeForCausalLM(ExaoneMoeConfig(**shape, **experts, sliding_window=64))


def save_exaone_head(folder: Path) -> None:
    """Add a random head for the token after the next (MTP) to a saved model: a layer with a window, as K-EXAONE has."""
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


SIZES: dict[Callable[[], Any], dict[str, Any]] = {**MODELS, exaone_moe: {"block": 32, "max_model_len": 384}}
GROUPED: dict[Callable[[], Any], dict[str, int]] = {
    gemma2: {"ngram": 36},  # vLLM 0.32 has no output layer of it to give to a head
    gemma3: {"ngram": 48, "eagle": 48},
    gpt_oss: {"ngram": 36, "eagle": 44},
    gemma4: {"ngram": 120, "eagle": 160},
    exaone_moe: {"ngram": 36, "mtp": 44},
}
"""With the blocks of the device, by what drafts: about half of what the agents' prompts need"""
CASES = [(build, method) for build, blocks in GROUPED.items() for method in blocks]
Answers = tuple[Path, list[list[int]], list[list[int]]]


def size_of(build: Callable[[], Any]) -> dict[str, Any]:
    return {"max_model_len": SIZES[build]["max_model_len"], "enable_prefix_caching": True}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[], Any]], Answers]:
    """A random model, and stock's answers without drafts."""

    @cache
    def of(build: Callable[[], Any]) -> Answers:
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp(build.__name__)
        build().eval().save_pretrained(folder)
        if build is exaone_moe:
            save_exaone_head(folder)
        with driver(folder, plugged=False, **size_of(build)) as plain:
            return folder, groups.cycle(plain, SIZES[build]["block"]), groups.conversation(plain, SIZES[build]["block"])

    return of


@pytest.mark.parametrize(("build", "method"), CASES, ids=[f"{build.__name__}-{method}" for build, method in CASES])
def test_answers_of_models_with_several_groups_are_stocks(
    answers: Callable[[Callable[[], Any]], Answers], build: Callable[[], Any], method: str, tmp_path: Path
) -> None:
    (model, agents, sessions), block, drafts = answers(build), SIZES[build]["block"], NGRAMS
    size = {**size_of(build), "num_gpu_blocks_override": GROUPED[build][method]}
    if method == "eagle":
        drafts = {"method": "eagle", "model": str(save_eagle_head(tmp_path)), "num_speculative_tokens": 2}
    elif method == "mtp":
        drafts = {"method": "mtp", "num_speculative_tokens": 1}
    with driver(model, extra={"tiers": {"host_memory": "400 blocks"}}, speculative_config=drafts, **size) as built:
        assert len(built.scheduler.kv_cache_config.kv_cache_groups) > 1
        assert groups.cycle(built, block) == agents
        assert built.side.totals().get("blocks_loaded"), "fixed prompts come back from the host"
        assert groups.conversation(built, block) == sessions
        assert built.side.totals().get("failed_copies", 0) == 0
        assert drafted(built) > 0
        output = built.ask(with_value(VALUES[0]), kedge=hints(VALUES[0]))
        assert "KV cache groups" in receipt(output)["misses"][0]["reason"]
        groups.check_rest(built)
