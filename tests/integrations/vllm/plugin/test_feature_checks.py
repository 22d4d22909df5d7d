"""Parts that are switched off where vLLM or the model is not as expected. No engine is started."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Olmo3Config,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kedge.integrations.vllm.entry_point import version_refusal
from kedge.integrations.vllm.plugin import feature_checks as compat
from kedge.integrations.vllm.plugin import scheduler
from kedge.integrations.vllm.plugin.scheduler import AsyncStepScheduler, StepScheduler, make_scheduler

SPEC = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}


def config(**changes: Any) -> Any:
    parts: dict[str, Any] = {
        "cache_config": {"enable_prefix_caching": True, "cache_dtype": "auto", "hash_block_size": None},
        "scheduler_config": {"get_scheduler_cls": lambda: make_scheduler, "async_scheduling": False},
        "parallel_config": {
            "use_ubatching": False, "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "data_parallel_size": 1,
        },
        "model_config": {"use_mla": False, "uses_mrope": False, "hf_text_config": LlamaConfig(), "is_moe": False},
        "kv_transfer_config": {"kv_load_failure_policy": "fail", "kv_connector": "KedgeConnector"},
    }  # fmt: skip
    for name, value in changes.items():
        next(part for part in parts.values() if name in part)[name] = value
    built = {name: SimpleNamespace(**part) for name, part in parts.items()}
    return SimpleNamespace(**built, speculative_config=None)


def groups(*specs: Any) -> Any:
    listed = [SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"]) for spec in specs]
    return SimpleNamespace(kv_cache_groups=listed)


DYNAMIC = LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
ONE = groups(FullAttentionSpec(**SPEC))


WINDOW = groups(FullAttentionSpec(**SPEC, sliding_window=64))
ALONE, BOTH = (
    groups(SlidingWindowSpec(**SPEC, sliding_window=64), *more) for more in ([], [FullAttentionSpec(**SPEC)])
)
WINDOWED = [{"hf_text_config": model} for model in (Gemma2Config(), Gemma3TextConfig(), GptOssConfig())]


@pytest.mark.parametrize(
    ("changes", "cache", "reason"),
    [
        ({"pipeline_parallel_size": 2}, ONE, "pipeline"),
        ({"decode_context_parallel_size": 2}, ONE, "context parallelism"),
        ({"cache_dtype": "int8_per_token_head"}, ONE, "int8_per_token_head"),
        ({"cache_dtype": "fp8_ds_mla"}, ONE, "fp8_ds_mla"),
        ({"use_mla": True}, ONE, "MLA"),
        ({"uses_mrope": True}, ONE, "M-RoPE"),
        ({"hf_text_config": DYNAMIC}, ONE, "dynamic"),
        ({"use_ubatching": True}, ONE, "microbatching"),
        ({"data_parallel_size": 2, "is_moe": True}, ONE, "data parallelism"),
        ({"kv_load_failure_policy": "recompute"}, ONE, "kv_load_failure_policy must be 'fail'"),
        ({}, groups(FullAttentionSpec(**SPEC, attention_chunk_size=64)), "attention in chunks"),
        *(({"hf_text_config": one()}, WINDOW, "sliding-window attention") for one in (MistralConfig, Olmo3Config)),
        ({}, BOTH, "the model has 2 KV cache groups"),
        *((model, BOTH, "--disable-hybrid-kv-cache-manager") for model in WINDOWED),
    ],
)
def test_what_cannot_be_translated_is_cached_all_the_same(changes: dict[str, Any], cache: Any, reason: str) -> None:
    found = compat.find_features(config(**changes), cache, 10)
    assert found.translation and reason in found.translation
    assert found.eviction is None and found.host is None


@pytest.mark.parametrize(
    ("changes", "cache"),
    [
        ({}, ONE),
        *(({"cache_dtype": kept}, ONE) for kept in ("fp8", "fp8_e4m3", "fp8_e5m2")),
        ({"data_parallel_size": 2, "is_moe": False}, ONE),  # vLLM lets these run as if each were alone
        *((model, WINDOW) for model in WINDOWED),  # one group keeps what windows leave behind
    ],
)
def test_everything_is_on_beside_what_changes_nothing(changes: dict[str, Any], cache: Any) -> None:
    assert compat.find_features(config(**changes), cache, 10) == compat.Features(None, None, None)


def test_a_block_is_of_one_group_at_a_time_and_windows_alone_have_no_host_tier() -> None:
    assert compat.cache_groups(config(), BOTH).main.number == 1
    assert compat.block_bytes(BOTH) == compat.block_bytes(ONE) == 2 * 2 * 32 * 2 * 32 * 4, "keys and values, all layers"
    found = compat.find_features(config(**WINDOWED[0]), ALONE, 10)
    assert found.translation == "its KV is a SlidingWindowSpec, not full attention"
    assert found.eviction is None and found.host and "none has full attention" in found.host


def test_without_a_prefix_cache_or_with_other_hashes_there_is_nothing_to_keep() -> None:
    found = compat.find_features(config(enable_prefix_caching=False), ONE, 10)
    assert found.eviction == found.host == "prefix caching is off" and found.translation is None
    ahead = config()
    ahead.num_hash_lookahead_tokens = 1
    found = compat.find_features(ahead, ONE, 10)
    assert found.eviction is None
    assert found.host == found.translation == "hashes are of a block and tokens behind it"


@pytest.mark.parametrize("version", ["0.30.9", "0.34.0", "0.100.2", "0.34.0.dev12+g1234", "1.0", "dev"])
def test_another_version_switches_everything_off(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    found = compat.find_features(config(), ONE, 10)
    with caplog.at_level(logging.WARNING):
        found.log()
    reason = f"vLLM {version} is not one of 0.31 to 0.33, whose insides this Kedge knows"
    assert caplog.messages == [f"kedge: {one} is off: {reason}" for one in ("eviction", "host", "translation")]
    monkeypatch.setattr(scheduler, "Scheduler", SimpleNamespace)
    assert type(make_scheduler(config())) is SimpleNamespace
    assert caplog.messages[-1] == f"kedge: --scheduler-cls is vLLM's own: {reason}"
    assert not any(map(version_refusal, ("0.33.2", "0.33.0rc1", "0.32.1+cpu", "0.31.0"))), "these are known"


# lanes ----------------------------------------------------------------------------------------------------------------


def lanes(**changes: Any) -> str | None:
    return compat.find_features(config(**changes), ONE, 10).translation


def test_translation_needs_kedges_scheduler_and_no_other_connector(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert lanes() is None
    assert lanes(get_scheduler_cls=lambda: AsyncStepScheduler) is None
    assert lanes(get_scheduler_cls=lambda: type("Own", (StepScheduler,), {})) is None
    for other in (Scheduler, lambda **_: None):
        reason = lanes(get_scheduler_cls=lambda other=other: other)
        assert reason == "--scheduler-cls is not kedge.integrations.vllm.plugin.scheduler.make_scheduler"
    with caplog.at_level(logging.WARNING):
        compat.Features(None, None, reason).log()
    assert caplog.messages == [f"kedge: translation is off: {reason}"]
    monkeypatch.setattr(scheduler, "Scheduler", SimpleNamespace)
    assert type(make_scheduler(config(kv_connector="MultiConnector"))) is SimpleNamespace
    assert caplog.messages[1].endswith("--kv-transfer-config does not name KedgeConnector alone")


def test_backends_have_to_write_before_they_attend() -> None:
    good = SimpleNamespace(forward_includes_kv_cache_update=False, get_name=lambda: "GOOD")
    assert compat.backends_refusal([good, good]) is None
    bad = SimpleNamespace(forward_includes_kv_cache_update=True, get_name=lambda: "BAD")
    unknown = SimpleNamespace(get_name=lambda: "UNKNOWN")
    for other in (bad, unknown):
        reason = f"{other.get_name()} may attend before the KV of the whole pass is written"
        assert compat.backends_refusal([good, other]) == reason


# speculative decoding ------------------------------------------------------------------------------------------------


def drafting(method: str, head: Any = None, lookahead: int = 0, **more: Any) -> Any:
    """A model whose tokens are drafted so; by default, its head is as the model."""
    found, draft = config(), SimpleNamespace(hf_text_config=head or LlamaConfig())
    found.speculative_config = SimpleNamespace(method=method, draft_model_config=draft, use_eagle=lambda: False, **more)
    found.num_prefill_lookahead_tokens = lookahead
    return found


ROPE = {"rope_type": "default", "rope_theta": 5.0}
HEADS: list[tuple[Any, str]] = [
    *((drafting(one), "") for one in ("ngram", "ngram_gpu", "suffix", "medusa", "eagle", "eagle3", "mtp")),
    *((drafting(one), "the draft's KV") for one in ("draft_model", "dflash", "dspark", "custom_class", "invented")),
    (drafting("eagle", LlamaConfig(rope_parameters=ROPE)), "rotates keys in another way"),
    (drafting("eagle", DYNAMIC), "dynamic RoPE"),
    (drafting("eagle", DeepseekV3Config()), "MLA"),
    (drafting("mtp", lookahead=3), "by 3 heads"),
    (drafting("eagle3", parallel_drafting=True), "parallel drafting"),
]


@pytest.mark.parametrize(("given", "why"), HEADS)
def test_drafts_that_change_what_is_translated_are_refused(given: Any, why: str) -> None:
    refusal = compat.find_features(given, ONE, 10).translation or ""
    assert why in refusal and bool(why) == bool(refusal)
