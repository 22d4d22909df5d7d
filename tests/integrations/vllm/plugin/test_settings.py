"""The plug-in's settings: the sections of `kedge.toml`, checked in the same way."""

from __future__ import annotations

from typing import Any

import pytest

from kedge.errors import ConfigError
from kedge.integrations.vllm.plugin.settings import PluginSettings
from kedge.types import ReuseMode


def test_sections_are_those_of_the_file() -> None:
    settings = PluginSettings.model_validate(
        {"reuse": "exact", "tiers": {"host_memory": "1KiB", "policy": "lru"}, "planner": {"min_translated": 0.9}}
    )
    assert settings.reuse is ReuseMode.EXACT and settings.tiers.policy == "lru"
    assert settings.tiers.host_memory == 1024
    assert settings.planner.min_translated == 0.9


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ({"tier": {}}, "kv_connector_extra_config.tier"),
        ({"tiers": 5}, "engine.tiers"),
        ({"tiers": {"backup_hits": -1}}, "engine.tiers.backup_hits"),
        ({"reuse": "sometimes"}, "kv_connector_extra_config.reuse"),
        ({"max_captures": 0}, "kv_connector_extra_config.max_captures"),
        ({"forecast_ttl": 0}, "kv_connector_extra_config.forecast_ttl"),
    ],
)
def test_bad_values_are_named(extra: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PluginSettings.model_validate(extra)
    assert caught.value.key == key
