"""The engine that `kedge serve` runs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kedge.cli import run
from kedge.cli.preflight import require_model

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from kedge.engine.base import Engine
    from kedge.engine.local.engine import LocalEngine
    from kedge.server.tenancy import KeyRing
    from kedge.settings import Settings


def open_engine(settings: Settings, keys: KeyRing) -> AbstractContextManager[Engine]:
    """Open the engine that the settings name; the embedded one runs in its own process unless they say otherwise. vLLM
    gets the folder of saved state and the quotas of tenants at its start.

    Raises `ConfigError` or `ModelNotFound`.
    """
    if settings.engine.backend == "vllm":
        return _open_vllm(settings, keys)
    if not settings.server.engine_process:
        return run.open_engine(settings)
    require_model(settings.engine.model)
    from kedge.engine.process.local import LocalProcessEngine

    return LocalProcessEngine(partial(_open_local, settings))


def _open_vllm(settings: Settings, keys: KeyRing) -> AbstractContextManager[Engine]:
    run.require_vllm()
    from kedge.engine.base import Quota
    from kedge.integrations.vllm.engine.engine import VLLMEngine
    from kedge.integrations.vllm.engine.options import KeepingOptions

    server = settings.server
    quotas = {tenant.id: tenant.quota for tenant in keys.tenants if tenant.quota != Quota()}
    keeping = KeepingOptions(server.state, server.snapshot_interval, quotas)
    return VLLMEngine(config=settings.engine, keeping=keeping)


def _open_local(settings: Settings) -> LocalEngine:
    """Open the embedded engine in its process, with the server's log format."""
    from kedge.engine.local.engine import LocalEngine
    from kedge.server import logs

    logs.configure(settings.server.log_format)
    engine = run.open_engine(settings)
    assert isinstance(engine, LocalEngine)
    return engine
