"""Every architecture of a table, and every causal model of Transformers, tiny and random: it is served as Transformers
generates, translated as well as Llama, or refused.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel

from kedge.anchors.estimators import ESTIMATORS
from kedge.anchors.translator import in_chunks, in_one_pass, translate_into
from kedge.engine.local.model.loading import checked_runner, require_buildable
from kedge.engine.local.model.replica import VOCABULARY, random_model, small_config
from kedge.engine.local.model.runner import ModelRunner
from kedge.engine.local.sequence import Sequence, Work, flatten
from kedge.errors import UnsupportedModel
from kedge.kv.segment import KVSegment
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.settings import AnchorSettings, TierSettings
from kedge.types import Namespace, ReuseMode, Tokens
from tests.engine.common.state.test_files import record_files
from tests.engine.common.state.test_snapshot import ask
from tests.engine.local.conftest import DEVICE, YARN, engine_of
from tests.engine.local.conftest import SHAPE as TINY
from tests.engine.local.test_engine import greedy, prompt
from tests.engine.local.test_engine import request as plain
from tests.engine.local.test_translation import OPEN, SETTINGS, Driver, relative, request, tokens
from tests.marks import on_push

SHAPE: Mapping[str, Any] = {**TINY, "tie_word_embeddings": False}
"""Sizes of all small models"""
MIXED = ["sliding_attention", "sliding_attention", "full_attention"]
TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}  # fmt: skip
DEEPSEEK = {**LATENT, **EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1}


ARCHITECTURES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "Llama": ("llama", {}),
    "Llama, YaRN": ("llama", {"rope_parameters": YARN}),
    "Mistral": ("mistral", {"sliding_window": None}),
    "Qwen3": ("qwen3", {"head_dim": 32}),
    "Qwen3 MoE": ("qwen3_moe", {"head_dim": 16, "num_experts": 4, **EXPERTS}),
    "OLMo 2": ("olmo2", {}),
    "Granite": ("granite", {}),
    "Phi, partial rotary": ("phi", {}),
    "GPT-NeoX, partial rotary": ("gpt_neox", {}),
    "GLM-4, partial rotary": ("glm4", {"head_dim": 16}),
    "Cohere, neighbours paired": ("cohere", {}),
    "SmolLM3, layers without RoPE": ("smollm3", {"no_rope_layers": [1, 1, 0]}),
    "Mistral, sliding window": ("mistral", {"sliding_window": 16}),
    "Gemma 2": ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16,
                              "layer_types": MIXED}),
    "Gemma 3": ("gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16,
                                   "layer_types": MIXED, "rope_parameters": TWO_ROPES}),
    "Gemma 4": ("gemma4_text",
        {"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
         "sliding_window": 16, "layer_types": MIXED, "hidden_size_per_layer_input": 16,
         "vocab_size_per_layer_input": VOCABULARY}),
    "Gemma 4, layers that share KV": ("gemma4_text",
        {"head_dim": 16, "global_head_dim": 32, "sliding_window": 16, "num_hidden_layers": 6, "layer_types": 2 * MIXED,
         "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY}),
    "OLMo 3": ("olmo3",
        {"sliding_window": 16, "layer_types": MIXED, "rope_parameters": {**TWO_ROPES, "full_attention": YARN}}),
    "gpt-oss, attention sinks": ("gpt_oss",
        {"head_dim": 16, "sliding_window": 16, "layer_types": MIXED, "num_local_experts": 4, "num_experts_per_tok": 2,
         "rope_parameters": YARN}),
    "MiMo V2, sinks and narrow values": ("mimo_v2_flash",
        {**EXPERTS, "head_dim": 24, "v_head_dim": 16, "n_routed_experts": 4, "sliding_window": 16,
         "layer_types": MIXED, "mlp_layer_types": ["dense", "sparse", "sparse"], "rope_parameters": TWO_ROPES}),
    "Gemma 3n": ("gemma3n_text",
        {"head_dim": 16, "sliding_window": 16, "num_hidden_layers": 6, "layer_types": 2 * MIXED, "laurel_rank": 8,
         "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY,
         "rope_parameters": TWO_ROPES, "activation_sparsity_pattern": [0.0] * 6, "intermediate_size": [96] * 6}),
    "DeepSeek-V2, MLA": ("deepseek_v2", {**DEEPSEEK, "topk_method": "group_limited_greedy"}),
    "DeepSeek-V3 and Kimi K2, MLA": ("deepseek_v3", DEEPSEEK),
    "DeepSeek-V3, MLA and YaRN": ("deepseek_v3", {**DEEPSEEK, "rope_parameters": YARN}),
    "GLM-4.7-Flash, MLA": ("glm4_moe_lite", DEEPSEEK),
    "MiniCPM3, MLA": ("minicpm3", LATENT),
    "HunYuan, keys scaled after rotation": ("hunyuan_v1_dense", {"head_dim": 16}),
    "Phi-3, LongRoPE": ("phi3", {
        "original_max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "short_factor": [1.0] * 8,
                            "long_factor": [4.0] * 8, "original_max_position_embeddings": 512},
    }),
}  # fmt: skip


LINEAR = "layers of type linear_attention keep one state of all tokens before"
REFUSED: dict[str, tuple[str, Mapping[str, Any], str]] = {
    "DeepSeek-V3.2, sparse MLA": ("deepseek_v32", DEEPSEEK, "layers of type indexed_attention"),
    "GLM-5, sparse MLA": ("glm_moe_dsa", DEEPSEEK, "layers of type indexed_attention"),
    "Qwen3-Next, linear attention": ("qwen3_next", {}, LINEAR),
    "Jamba, state space": ("jamba", {"attn_layer_period": 3, "attn_layer_offset": 2}, LINEAR),
    "LFM2, short convolutions": ("lfm2", {"layer_types": ["conv", "conv", "full_attention"]}, "layers of type conv"),
    "Falcon-H1, state space and attention in one layer": ("falcon_h1", {}, "layers of type hybrid keep one state"),
    "Mamba 2, state space only": ("mamba2", {"num_heads": 8, "head_dim": 16}, LINEAR),
    "RWKV": ("rwkv", {"num_attention_heads": None}, "its config has no `num_attention_heads`"),
    "Llama 4, chunked attention": ("llama4_text", {}, "layers of type chunked_attention"),
    "StableLM": ("stablelm", {}, "attention of its own only"),
    "GPT-2, learned positions": ("gpt2", {}, "no rotary position embedding"),
}  # fmt: skip
NOT_TRANSLATED = {
    "HunYuan, keys scaled after rotation": "the keys of layer 0 are rotated in none of the known ways",
    "Phi-3, LongRoPE": "longrope RoPE changes with the length of the prompt",
}
TRANSLATED = [name for name in ARCHITECTURES if name not in NOT_TRANSLATED]
ON_PUSH = {
    "Llama", "Llama, YaRN", "Qwen3 MoE", "GLM-4, partial rotary", "Cohere, neighbours paired",
    "SmolLM3, layers without RoPE", "Mistral, sliding window", "Gemma 2", "Gemma 4, layers that share KV",
    "gpt-oss, attention sinks", "MiniCPM3, MLA", "HunYuan, keys scaled after rotation", "Phi-3, LongRoPE",
}  # fmt: skip
"""One of each kind of attention, rotation and cache"""


def model_of(name: str, **changes: Any) -> PreTrainedModel:
    model_type, values = ARCHITECTURES[name]
    return random_model(AutoConfig.for_model(model_type, **{**SHAPE, **values, **changes}))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_served_is_translated_unless_its_keys_do_not_allow_it(name: str) -> None:
    refusal = checked_runner(model_of(name)).refusal
    assert refusal is None if name not in NOT_TRANSLATED else NOT_TRANSLATED[name] in str(refusal)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_with_the_reason(name: str) -> None:
    model_type, values, why = REFUSED[name]
    with pytest.raises(UnsupportedModel) as refused:
        require_buildable(AutoConfig.for_model(model_type, **{**SHAPE, **values}))
    assert why in refused.value.why


PROMPTS = [prompt(0, 5), prompt(1, 70), prompt(2, 200), prompt(2, 200)[:100] + prompt(3, 41)]
"""Of several lengths, longer than windows and passes; the last one begins as the one before it"""
CLOSE = 1e-3
"""By how much of the logits' range a token may miss the largest one: rounding decides between such"""


def served(model: PreTrainedModel, count: int) -> list[list[Tokens]]:
    """Answers to all prompts in one batch: without reuse, with it, and again, from cached blocks and parts of blocks.
    Raises `UnsupportedModel`.
    """
    answers = []
    with engine_of(model, max_batch_tokens=64) as engine:
        for mode, reused in ((ReuseMode.OFF, [0] * 4), (ReuseMode.EXACT, None), (ReuseMode.EXACT, [4, 69, 199, 140])):
            streams = [engine.submit(plain(one, mode, max_tokens=count)) for one in PROMPTS]
            done = [stream.result(120) for stream in streams]
            assert reused is None or [one.receipt.exact for one in done] == reused
            answers.append([one.tokens for one in done])
    return answers


@torch.no_grad()
def missed(model: PreTrainedModel, tokens: Tokens, answer: Tokens) -> list[int]:
    """Which tokens of an answer are not those of greedy decoding by Transformers' own eager attention."""
    model.set_attn_implementation("eager")
    logits = model(input_ids=torch.tensor([tokens + answer]), use_cache=False).logits[0, len(tokens) - 1 : -1]
    best, lowest = logits.amax(-1), logits.amin(-1)
    taken = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return ((best - taken) > CLOSE * (best - lowest)).nonzero().flatten().tolist()


def require_right(model: PreTrainedModel, count: int) -> None:
    """Raise `UnsupportedModel`, or assert that all answers are those of Transformers."""
    for answers in served(model, count):
        assert [missed(model, *one) for one in zip(PROMPTS, answers, strict=True)] == [[]] * len(PROMPTS)


@pytest.mark.parametrize("name", on_push(ARCHITECTURES, ON_PUSH))
def test_answers_are_those_of_transformers_with_and_without_exact_reuse(name: str) -> None:
    require_right(model_of(name), 64)


def test_the_comparison_sees_an_answer_that_is_wrong() -> None:
    model = model_of("Llama")
    first, *_ = served(model, 16)[0]
    wrong = (*first[:3], (first[3] + 1) % VOCABULARY, *first[4:])
    assert missed(model, PROMPTS[0], first) == [] and 3 in missed(model, PROMPTS[0], wrong)


def kv_at(runner: ModelRunner, prompt: Tokens, start: int) -> KVSegment:
    """Unrotated KV of a prompt whose positions begin at `start`, with nothing before it."""
    storage = PagedStorage(runner.spec, 16, 16, runner.device, runner.rotary)
    sequence = Sequence("x", Namespace(""), list(prompt), SlotTable.of(list(range(16)), 16))
    batch = flatten([Work(sequence, list(range(len(prompt))))], storage)
    batch.positions = batch.positions + start
    runner.forward(batch)
    keys = runner.rotary.unrotate(storage.keys[:, : len(prompt)], slice(start, start + len(prompt)))
    return KVSegment(keys, storage.values[:, : len(prompt)])


@pytest.mark.parametrize("name", TRANSLATED)
def test_kv_of_a_prompt_is_the_same_wherever_it_begins(name: str) -> None:
    """All positions moved by the same number change no score, and so nothing but the rotation of keys."""
    runner = checked_runner(model_of(name))
    here, there = (kv_at(runner, prompt(5, 60), start) for start in (0, 700))
    for layer in range(runner.spec.layers):
        assert relative(there.keys[layer], here.keys[layer]) < 1e-3
        assert relative(there.values[layer], here.values[layer]) < 1e-3


UNLIKE = ["Gemma 3", "Gemma 4", "gpt-oss, attention sinks", "MiMo V2, sinks and narrow values", "DeepSeek-V2, MLA"]
NARROW = ["Gemma 4", "MiMo V2, sinks and narrow values"]
"""Those with layers that do not fill the pool"""


@pytest.mark.parametrize("name", UNLIKE)
def test_kv_comes_back_from_the_host(name: str) -> None:
    model = model_of(name)
    asked = [prompt(i, 100) for i in range(4)]
    wanted = [greedy(model, one, 8) for one in asked]
    tiers = TierSettings(host_memory="100 blocks", backup_hits=0, policy="lru")
    with engine_of(model, kv_memory="16 blocks", tiers=tiers) as engine:
        for again in range(2):
            for one, answer in zip(asked, wanted, strict=True):
                done = engine.submit(plain(one, max_tokens=8)).result(60)
                engine.wait_idle(60)
                assert done.tokens == answer
                assert done.receipt.exact == (96 if again else 0)


QUESTIONS = ((70, None), (80, None), (70, 81))


@pytest.mark.parametrize("name", ["Llama", *UNLIKE])
def test_what_was_learned_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    with engine_of(model_of(name), **SETTINGS) as teacher:
        for seed in (50, 60):
            ask(teacher, seed)
        saved = teacher.save(tmp_path)
        assert (saved.pools, saved.templates) == (2, 1)
        assert saved.nbytes == sum(path.stat().st_size for path in record_files(tmp_path))
        wanted = [ask(teacher, *one) for one in QUESTIONS]
    assert wanted[2][1] > 0
    with engine_of(model_of(name), **SETTINGS) as pupil:
        assert pupil.load(tmp_path).pools == 2
        assert [ask(pupil, *one) for one in QUESTIONS] == wanted


BY_EVERY_ESTIMATOR = ("Llama", *NARROW, "DeepSeek-V2, MLA")
REPEATED = [
    *((name, estimator) for name in BY_EVERY_ESTIMATOR for estimator in ESTIMATORS),
    *(
        pytest.param(name, AnchorSettings().estimator, marks=() if name in ON_PUSH else pytest.mark.slow)
        for name in TRANSLATED
        if name not in BY_EVERY_ESTIMATOR
    ),
]


@pytest.mark.parametrize(("name", "estimator"), REPEATED)
def test_an_exact_repeat_of_an_anchor_reproduces_its_kv_and_what_a_layer_does_not_fill_stays_zero(
    name: str, estimator: str
) -> None:
    driver = Driver(model_of(name), anchors=AnchorSettings(**OPEN, estimator=estimator), device=DEVICE.type)
    asked = request(tokens(50, 30), tokens(51, 12))
    for seed in (60, 61):
        driver.serve(request(tokens(seed, 30), tokens(seed + 5, 12)))
    first, dense = driver.serve(asked)
    again, translated = driver.serve(replace(asked, request_id="again"))
    assert again.plan.translates and not first.plan.translates
    assert relative(translated.keys, dense.keys) < 1e-3
    assert relative(translated.values, dense.values) < 1e-3
    for kv in (translated, dense):
        for number, shape in enumerate(driver.runner.spec.shapes):
            for pool, dim in ((kv.keys[number], shape.key_dim), (kv.values[number], shape.value_dim)):
                assert not pool[:, shape.kv_heads :].any() and not pool[..., dim:].any()


@pytest.mark.parametrize(
    ("name", "how"), [("Llama", in_one_pass), ("Gemma 3", in_chunks), ("DeepSeek-V2, MLA", in_chunks)]
)
def test_the_kernel_that_translates_takes_one_rotation_of_the_first_dimensions(
    name: str, how: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PagedStorage, "has_kernels", True)
    runner = checked_runner(model_of(name))
    chosen = translate_into(PagedStorage(runner.spec, 32, 16, runner.device, runner.rotary))
    assert isinstance(chosen, partial)
    assert chosen.func is how


# every causal language model of the installed Transformers ------------------------------------------------------------

KINDS = {kind.model_type: kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING}
FAMILIES = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "mistral", "phi3", "granite", "olmo2", "cohere", "glm4",
    "smollm3", "gpt_neox", "gemma3_text", "gemma4_text", "olmo3", "gpt_oss", "mimo_v2_flash", "deepseek_v3",
    "glm4_moe_lite", "minicpm3", "longcat_flash",
)  # fmt: skip
"""Families that must not be refused"""
FAMILIES_ON_PUSH = (
    *FAMILIES, "apertus", "arcee", "bamba", "bert", "bloom", "codegen", "exaone4", "falcon", "gpt2", "gptj", "jetmoe",
    "lfm2", "llama4_text", "mamba", "mixtral", "mpt", "nemotron", "opt", "phi", "stablelm",
)  # fmt: skip
"""42 families, some of which are refused"""
MOST_UNBUILT = 20
FEWEST_RIGHT = 65
COUNTED = "5.23"
"""The minor of Transformers of which `docs/limits.md` has the counts"""
LIMITS = Path(__file__).parents[4] / "docs" / "limits.md"


@cache
def outcome(kind: str) -> str:
    """`right` or `refused`; `unbuilt` where there is no tiny model of this kind. Anything else raises."""
    try:
        config = small_config(KINDS[kind]())
    except Exception:  # each family checks in its own way whether its sizes, cut down, go together
        return "unbuilt"
    try:
        require_buildable(config)
        require_right(random_model(config), 16)
    except UnsupportedModel as error:
        assert error.why
        return "refused"
    return "right"


@pytest.mark.parametrize("kind", on_push(sorted(KINDS), FAMILIES_ON_PUSH))
def test_every_model_is_right_or_refused(kind: str) -> None:
    assert outcome(kind) == "right" or kind not in FAMILIES


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
