"""Tells the cache where the fixed part of every agent's prompt ends (KVFlow, section 3.3)."""

from __future__ import annotations

import time
from collections.abc import Mapping

from kedge.cache import CacheManager
from kedge.policies.fixed_prompts import FixedLengths
from kedge.types import GenerateRequest, Tokens
from kedge.workflow.forecast import AgentKey


class FixedPrompts:
    """Labels what is cached of fixed prompts. Requests without an agent have none."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._lengths = FixedLengths()

    def called(self, request: GenerateRequest) -> None:
        """The prompt of `request` is in the cache now, as far as it is exact."""
        if request.agent and (length := self._lengths.of(request, time.monotonic())):
            key = request.agent_key
            self.label(key, request.tokens[:length])

    def label(self, key: AgentKey, tokens: Tokens) -> None:
        """`tokens` are the fixed prompt of `key`: what of them is cached is labelled."""
        self._cache.on_label(key.namespace, key, tokens)

    def known(self, prompts: Mapping[AgentKey, Tokens]) -> None:
        """Label the fixed prompts of agents that are going to call."""
        for key, tokens in prompts.items():
            self.label(key, tokens)
