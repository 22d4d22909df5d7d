"""Parts that are switched off where vLLM or the model is not as expected. No engine is started."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch  # noqa: E402
from transformers import LlamaConfig  # noqa: E402
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec  # noqa: E402

from kedge.integrations.vllm.plugin import feature_checks as compat

SPEC = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}


def config(**changes: Any) -> Any:
    parts: dict[str, Any] = {
        "cache_config": {"enable_prefix_caching": True, "cache_dtype": "auto", "hash_block_size": None},
        "parallel_config": {
            "pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1,
        },
        "model_config": {"use_mla": False, "uses_mrope": False, "hf_text_config": LlamaConfig()},
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


def test_everything_is_on_where_it_fits() -> None:
    assert compat.find_features(config(), ONE, 10) == compat.Features(None, None, None)


def test_a_block_is_keys_and_values_of_all_layers() -> None:
    assert compat.block_bytes(ONE) == 2 * 2 * 32 * 2 * 32 * 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"cache_dtype": "fp8"}, "fp8"),
        ({"use_mla": True}, "MLA"),
        ({"uses_mrope": True}, "M-RoPE"),
        ({"hf_text_config": DYNAMIC}, "dynamic"),
    ],
)
def test_models_that_cannot_be_translated_are_cached_all_the_same(changes: dict[str, Any], reason: str) -> None:
    found = compat.find_features(config(**changes), ONE, 10)
    assert found.translation and reason in found.translation
    assert found.eviction is None and found.host is None


def test_several_groups_keep_the_order_of_eviction_only() -> None:
    window = SlidingWindowSpec(**SPEC, sliding_window=64)
    found = compat.find_features(config(), groups(FullAttentionSpec(**SPEC), window), 10)
    assert found.eviction is None and found.host and found.translation
    alone = compat.find_features(config(), groups(window), 10)
    assert alone.translation and "SlidingWindowSpec" in alone.translation


def test_without_a_prefix_cache_there_is_nothing_to_keep() -> None:
    found = compat.find_features(config(enable_prefix_caching=False), ONE, 10)
    assert found.eviction == found.host == "prefix caching is off" and found.translation is None


def test_another_version_switches_everything_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compat.vllm, "__version__", "0.33.1")
    found = compat.find_features(config(), ONE, 10)
    with caplog.at_level(logging.WARNING):
        found.log()
    assert [record.getMessage() for record in caplog.records] == [
        f"kedge: {part} is off: vLLM 0.33.1 is not supported; must be one of 0.32.x"
        for part in ("eviction", "host", "translation")
    ]


def test_a_new_method_of_the_free_queue_switches_eviction_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FreeKVCacheBlockQueue, "popright", lambda _: None, raising=False)
    found = compat.find_features(config(), ONE, 10)
    assert found.eviction == found.host == "vLLM's free queue has a `popright` that Kedge's does not match"
    assert found.translation is None
