"""Labels the fixed part of every agent's prompt in the cache (KVFlow, section 3.3)."""

from __future__ import annotations

import time
from collections.abc import Mapping

from kedge.cache import CacheManager
from kedge.engine.local.sessions import SessionCaching
from kedge.policies.fixed_prompts import FixedLengths
from kedge.policies.sessions import Turn
from kedge.types import GenerateRequest, Tokens
from kedge.workflow.forecast import AgentKey


class FixedPrompts:
    """The labels of cached fixed prompts. Requests without an agent have none."""

    def __init__(self, cache: CacheManager, sessions: SessionCaching) -> None:
        self._cache, self._sessions = cache, sessions
        self._lengths = FixedLengths()

    def called(self, request: GenerateRequest, turn: Turn | None) -> None:
        """Label the fixed prompt of `request`, now that the exact part of its prompt is cached."""
        if request.agent and (length := self._lengths.of(request, time.monotonic())):
            key = request.agent_key
            self._label(key, request.tokens[:length], turn)

    def _label(self, key: AgentKey, tokens: Tokens, turn: Turn | None = None) -> None:
        """Label the cached part of `tokens` as the fixed prompt of `key`."""
        self._cache.on_label(key.namespace, key, tokens)
        self._sessions.labelled(key, tokens, turn)

    def length(self, request: GenerateRequest, now: float) -> int | None:
        """Return how many tokens the fixed prompt of `request` had by its agent's last call; None: not known."""
        return self._lengths.known(request, now) if request.agent else None

    def known(self, prompts: Mapping[AgentKey, Tokens]) -> None:
        """Label the fixed prompts of agents that are about to call."""
        for key, tokens in prompts.items():
            self._label(key, tokens)
