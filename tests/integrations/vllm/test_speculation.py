"""Speculative decoding beside the plug-in: answers are stock's, and translated ones those without drafts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.integrations.vllm.conftest import SHAPE, Driver, driver, receipt
from tests.integrations.vllm.lane_prompts import ONE, OTHER, ask, lane_engine, tokens

NGRAMS: dict[str, Any] = {
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
}  # fmt: skip
SIZE: dict[str, Any] = {"num_gpu_blocks_override": 20, "max_model_len": 256}
COUNT = 24


def save_eagle_head(folder: Path) -> Path:
    """A random head of EAGLE's for the tiny Llama: a layer behind the model's."""
    shape = {**SHAPE, "num_hidden_layers": 1}
    torch.manual_seed(1)
    layer = LlamaForCausalLM(LlamaConfig(**shape)).model.layers[0].state_dict(prefix="layers.0.")
    weights = {name: weight for name, weight in layer.items() if "input_layernorm" not in name}
    weights["fc.weight"] = torch.randn(shape["hidden_size"], 2 * shape["hidden_size"]) * 0.2
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**shape, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_glm4(folder: Path) -> Path:
    """A random GLM-4 MoE of three layers with a head for the token after the next (MTP), as its fourth layer."""
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
        built.check_rest()


def test_translated_answers_are_those_without_drafts(case: tuple[Path, dict[str, Any], Undrafted]) -> None:
    model, drafts, undrafted = case
    with lane_engine(model, asynchronous=False, speculative_config=drafts) as taught:
        assert translated(taught) == undrafted[1]
        assert drafted(taught) > 0
        layers = taught.worker._learner.pages.empty.keys.shape[0]
        assert layers == 3 + (drafts["method"] != "ngram"), "a head's layer is translated as the model's own"
        taught.check_rest()
