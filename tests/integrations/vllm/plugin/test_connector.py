"""What the connector decides on its own: how much of a GPU's memory anchors may take; and its settings."""

import logging
from typing import Any

import pytest
import torch

from kedge.errors import ConfigError
from kedge.integrations.vllm.plugin.connector import within_free_memory
from kedge.integrations.vllm.plugin.settings import PluginSettings
from kedge.settings import AnchorSettings

WANTED = AnchorSettings(max_bytes=8 << 30, max_base_bytes=4 << 30)
GPU = torch.device("cuda")


@pytest.mark.parametrize(("free", "share"), [(40, 1.0), (32, 1.0), (16, 0.5), (0, 0.0)])
def test_anchors_take_at_most_half_of_what_is_free_on_a_gpu(
    free: int, share: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free << 30, 80 << 30))
    monkeypatch.setattr(logging.getLogger("kedge"), "propagate", True)
    found = within_free_memory(WANTED, GPU)
    assert (found.max_bytes, found.max_base_bytes) == (share * (8 << 30), share * (4 << 30))
    assert ("gpu_memory_utilization" in caplog.text) == (share < 1), "it is said"
    assert within_free_memory(WANTED, torch.device("cpu")) is WANTED


# settings: the sections of `kedge.toml`, checked in the same way -----------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ({"tier": {}}, "kv_connector_extra_config.tier"),
        ({"tiers": 5}, "engine.tiers"),
        ({"tiers": {"backup_hits": -1}}, "engine.tiers.backup_hits"),
        ({"reuse": "sometimes"}, "kv_connector_extra_config.reuse"),
        ({"forecast_ttl": 0}, "kv_connector_extra_config.forecast_ttl"),
    ],
)
def test_bad_values_are_named(extra: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PluginSettings.model_validate(extra)
    assert caught.value.key == key
