"""A stand-in for the library NIXL, which is not installed here: it knows no other engine, so nothing is transferred."""

from __future__ import annotations

from typing import Any

import pytest


class IdleNixl:
    """What vLLM's `NixlConnector` calls while it has no peer."""

    registered = 0

    def __init__(self, *_: Any) -> None:
        """Take a name and a configuration."""

    def get_reg_descs(self, *_: Any) -> list[Any]:
        return []

    def get_xfer_descs(self, *_: Any) -> list[Any]:
        return []

    def register_memory(self, *_: Any, **__: Any) -> None:
        IdleNixl.registered += 1

    def deregister_memory(self, *_: Any) -> None:
        """Nothing was registered."""

    def prep_xfer_dlist(self, *_: Any, **__: Any) -> int:
        return 1

    def release_dlist_handle(self, *_: Any) -> None:
        """Nothing is held."""

    def get_agent_metadata(self) -> bytes:
        return b"idle"

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}


def use_idle_nixl(patch: pytest.MonkeyPatch) -> None:
    """Let vLLM take this for NIXL."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    patch.setattr(base_worker, "NixlWrapper", IdleNixl)
    patch.setattr(base_worker, "nixl_agent_config", lambda **_: None)
    patch.setattr(base_worker, "check_nixl_version", lambda _: None, raising=False)  # since 0.33
