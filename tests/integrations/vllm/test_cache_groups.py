"""Models with several KV cache groups: sliding windows or linear state beside full attention, some with drafts.

Agents take turns that do not fit the device, so that their prompts come back from the host; every answer is stock's.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.integrations.vllm.conftest import SHAPE, Driver, driver, prompt, receipt
from tests.integrations.vllm.test_speculation import NGRAMS, drafted, save_eagle_head
from tests.integrations.vllm.test_translation import VALUES, hints, tokens

AGENTS = 6
ENDS = [prompt(20, turn) for turn in range(3)]
LAYERS = {"tie_word_embeddings": False, "pad_token_id": 0}


def gemma2() -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    shape = {**SHAPE, "num_hidden_layers": 4, "pad_token_id": 0}
    return Gemma2ForCausalLM(Gemma2Config(**shape, sliding_window=64, query_pre_attn_scalar=32))


def gemma3(window: int = 64) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = (["sliding_attention"] * 2 + ["full_attention"]) * 2
    shape = {**SHAPE, **LAYERS, "num_hidden_layers": 6, "layer_types": kinds}
    return Gemma3ForCausalLM(Gemma3TextConfig(**shape, sliding_window=window, query_pre_attn_scalar=32))


def gpt_oss() -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    shape = {**SHAPE, **LAYERS, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    return GptOssForCausalLM(GptOssConfig(**shape, sliding_window=64, num_local_experts=4, num_experts_per_tok=2))


def gemma4() -> Any:
    """Its windows have blocks of 512 tokens, and full attention has blocks of 32."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    shape = {**SHAPE, **LAYERS, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    small = {"vocab_size_per_layer_input": SHAPE["vocab_size"], "hidden_size_per_layer_input": 16}
    return Gemma4ForCausalLM(Gemma4TextConfig(**shape, **small, sliding_window=64))


def qwen3_next() -> Any:
    """Blocks are of 544 tokens: as many as have the size of a state. vLLM computes it in bfloat16 only."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    shape = {**SHAPE, **LAYERS, "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
    linear = {"linear_num_value_heads": 2, "linear_num_key_heads": 2}
    linear |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Qwen3NextConfig(**shape, **linear, **experts, shared_expert_intermediate_size=32)
    return Qwen3NextForCausalLM(config)


Build = Callable[[], Any]
SIZES: dict[Build, dict[str, Any]] = {
    gemma4: {"max_model_len": 2048},
    qwen3_next: {"max_model_len": 2048, "dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"},
}
BLOCK_SIZES = {gemma4: 512, qwen3_next: 544}
ROOM: dict[Build, dict[str, int]] = {
    gemma2: {"": 36, "ngram": 36},  # vLLM 0.32 has no output layer of it to give to a head
    gemma3: {"": 48, "ngram": 48, "eagle": 48},
    gpt_oss: {"": 36, "ngram": 36, "eagle": 44},
    gemma4: {"": 120, "ngram": 120, "eagle": 160},
    qwen3_next: {"": 14},
}
"""Blocks of the device, by what drafts: about half of what the agents' prompts need"""


def fixed_prompts(block: int) -> list[list[int]]:
    blocks = 4 if block == 32 else 2
    return [prompt(blocks * block + 8, 700 + agent) for agent in range(AGENTS)]


def conversation(built: Driver, block: int) -> list[list[int]]:
    """Answers of sessions that grow turn by turn, without hints."""
    histories, answers = fixed_prompts(block)[:4], []
    for turn in range(3):
        for number, history in enumerate(histories):
            answers.append(built.answer(history, count=12))
            histories[number] = [*history, *answers[-1], *prompt(40, turn)]
    return answers


class Grouped(NamedTuple):
    """A saved model, tokens of its largest blocks, what vLLM starts with; stock's answers to agents and in sessions."""

    build: Build
    folder: Path
    block: int
    size: dict[str, Any]
    answers: tuple[list[list[int]], list[list[int]]]


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Build], Grouped]:
    """Stock's answers are found once for all that is drafted."""

    @cache
    def made(build: Build) -> Grouped:
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp(build.__name__)
        build().eval().save_pretrained(folder)
        size = {"max_model_len": 384, "enable_prefix_caching": True, **SIZES.get(build, {})}
        block, room = BLOCK_SIZES.get(build, 32), next(iter(ROOM[build].values()))
        with driver(folder, plugged=False, num_gpu_blocks_override=room, **size) as plain:
            assert len(plain.scheduler.kv_cache_config.kv_cache_groups) > 1
            answers = plain.cycle(count=8, prompts=fixed_prompts(block), ends=ENDS), conversation(plain, block)
        return Grouped(build, folder, block, size, answers)

    return made


@pytest.fixture
def model(request: pytest.FixtureRequest, grouped: Callable[[Build], Grouped]) -> Grouped:
    return grouped(request.param)


def check_host(built: Driver, fixed: list[int], block: int) -> None:
    """After vLLM's own cache was emptied, all but the end of a prompt comes from the host."""
    asked = {"run": "s", "agent": "a", "fixed_tokens": len(fixed) - 8, "steps": {"a": 1}}
    first = built.answer([*fixed, *prompt(20, 1)], count=8, kedge=asked)
    assert built.pool.reset_prefix_cache()
    output = built.ask([*fixed, *prompt(20, 1)], count=8, kedge={**asked, "run": "t"})
    assert list(output.outputs[0].token_ids) == first
    assert receipt(output)["tokens"]["host"] == (len(fixed) // block) * block


CASES = [(build, drafts) for build, room in ROOM.items() for drafts in room]


@pytest.mark.parametrize(
    ("model", "drafts"), CASES, indirect=["model"], ids=[f"{build.__name__}-{drafts}" for build, drafts in CASES]
)
def test_groups_are_cached_and_answers_are_stocks(model: Grouped, drafts: str, tmp_path: Path) -> None:
    build, folder, block, size, expected = model
    more: dict[str, Any] = {"num_gpu_blocks_override": ROOM[build][drafts], **size}
    if drafts == "eagle":
        head = str(save_eagle_head(tmp_path))
        more["speculative_config"] = {"method": "eagle", "model": head, "num_speculative_tokens": 2}
    elif drafts:
        more["speculative_config"] = NGRAMS
    with driver(folder, extra={"tiers": {"host_memory": "400 blocks"}}, **more) as built:
        assert built.cycle(count=8, prompts=fixed_prompts(block), ends=ENDS) == expected[0]
        loaded = built.side.totals()["blocks_loaded"]
        assert loaded > 0, "fixed prompts come back from the host"
        assert conversation(built, block) == expected[1]
        assert built.side.totals().get("failed_copies", 0) == 0
        if drafts:
            assert drafted(built) > 0
        else:
            assert built.side.totals()["blocks_loaded"] > loaded, "and histories do"
            check_host(built, fixed_prompts(block)[0], block)
        output = built.ask(tokens(VALUES[0]), kedge=hints(VALUES[0]))
        reason = receipt(output)["misses"][0]["reason"]
        assert "KV cache groups" in reason
        can_be_one = build in (gemma2, gemma3, gpt_oss)
        assert drafts or ("--disable-hybrid-kv-cache-manager" in reason) == can_be_one
        built.check_rest()


@pytest.mark.parametrize("model", [gemma2, gemma3, gpt_oss], indirect=True, ids=lambda build: build.__name__)
def test_crowds_that_do_not_fit_and_leave_are_answered_as_by_stock(model: Grouped) -> None:
    """Requests at once, some of which are aborted in the middle, with a host tier that is too small for them."""
    build, folder, block, more, _ = model
    size = {**more, "num_gpu_blocks_override": ROOM[build][""]}
    prompts = [[*fixed, *prompt(5 + number, number)] for number, fixed in enumerate(fixed_prompts(block))]
    with driver(folder, plugged=False, **size) as plain:
        expected = [plain.answer(one, count=6) for one in prompts]
    with driver(folder, extra={"tiers": {"host_memory": "20 blocks"}}, **size) as built:
        for turn in range(4):
            names = [built.add(one, count=6) for one in prompts]
            for _ in range(turn):
                built.step()
            left = names[turn % AGENTS]
            built.engine.abort_request([left])
            built.run()
            for name, answer in zip(names, expected, strict=True):
                if name != left:
                    assert list(built.finished[name].outputs[0].token_ids) == answer
            built.check_rest()
        built.reset()
        assert built.answer(prompts[0], count=6) == expected[0]
        built.check_rest()
