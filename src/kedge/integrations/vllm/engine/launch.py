"""What it takes to start vLLM with the plug-in in it: the connector's configuration, and a CPU's environment."""

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
"""GiB that vLLM may give to KV, and threads that go where the system puts them: several engines share the cores."""


def connector(extra: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's `kv_transfer_config`: the connector with these settings (`PluginSettings`).

    What it cannot bring is computed, never an error.
    """
    return {
        "kv_connector": "KedgeConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "kedge.integrations.vllm.plugin.connector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(extra),
    }


def transfer_config(extra: Mapping[str, Any]) -> KVTransferConfig:
    """The same, as vLLM's own object."""
    from vllm.config import KVTransferConfig

    return KVTransferConfig(**connector(extra))


def prepare_environment() -> None:
    """For processes that start from here on: what the caller has not set himself is set for a CPU, and vLLM reports
    errors only."""
    for name, value in {**CPU_ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}.items():
        os.environ.setdefault(name, value)
