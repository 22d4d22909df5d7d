"""The plug-in's settings: the sections of `kedge.toml`, checked in the same way."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kedge.errors import ConfigError
from kedge.integrations.vllm.plugin.settings import PluginSettings
from kedge.policies.eviction import lru
from kedge.types import ReuseMode


def test_sections_are_those_of_the_file() -> None:
    settings = PluginSettings.of(
        {"reuse": "exact", "tiers": {"host_memory": "1KiB", "policy": "lru"}, "planner": {"min_translated": 0.9}}
    )
    assert settings.reuse is ReuseMode.EXACT and settings.policy is lru
    assert settings.host_blocks(100) == 10
    assert settings.reuse_policy.min_translated == 0.9


def test_what_vllm_cannot_compute_is_not_planned() -> None:
    settings = PluginSettings()
    assert settings.reuse_policy.recompute_head == 0 and not settings.reuse_policy.recompute_tail
    assert settings.anchor_config.weak_error == math.inf


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ({"tier": {}}, "kv_connector_extra_config"),
        ({"tiers": 5}, "kv_connector_extra_config.tiers"),
        ({"tiers": {"prefetch_jobs": -1}}, "engine.tiers.prefetch_jobs"),
        ({"reuse": "sometimes"}, "reuse"),
        ({"forecast_ttl": 0}, "kv_connector_extra_config.forecast_ttl"),
    ],
)
def test_bad_values_are_named(extra: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PluginSettings.of(extra)
    assert caught.value.key == key


def test_a_host_tier_that_holds_no_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tiers\.host_memory"):
        PluginSettings.of({"tiers": {"host_memory": 10}}).host_blocks(100)
