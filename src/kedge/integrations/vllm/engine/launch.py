"""Configuration and environment for starting vLLM with the plug-in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""GiB of KV, and threads without binding to cores, which several engines share."""


def connector(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's `kv_transfer_config` for the connector with these settings (`PluginSettings`).

    A request whose translation cannot be written ends with an error: vLLM's other policy, `recompute`, answers wrongly
    on Model Runner V2 and with asynchronous scheduling.
    """
    return {
        "kv_connector": "KedgeConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "kedge.integrations.vllm.plugin.connector",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": dict(extra),
    }


def transfer_config(extra: Mapping[str, Any]) -> KVTransferConfig:
    """Return `connector(extra)` as vLLM's own type."""
    from vllm.config import KVTransferConfig

    return KVTransferConfig(**connector(extra))


def prepare_environment() -> None:
    """Set environment variables for a CPU and for quiet logs, except for those that are set already.

    They count for processes that are started afterwards.
    """
    for name, value in {**CPU_ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}.items():
        os.environ.setdefault(name, value)
