"""The fixed prompts of agents by forecast: the blocks of both tiers that hold one belong to its agent (KVFlow, 3.3)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

from kedge.discovery import FoundForecasts
from kedge.integrations.vllm.plugin.block_pools import own_prefix
from kedge.integrations.vllm.plugin.hints import HintedRequest
from kedge.policies.fixed_prompts import FixedLengths
from kedge.structures.bounded import BoundedDict
from kedge.types import AgentKey, Namespace, RunKey
from kedge.workflow.forecast import Changes, ForecastBoard
from kedge.workflow.steps import NextRun

AgentTemplate = tuple[Namespace, str, str, str]
"""(namespace, client, workflow, agent): the fixed prompt of an agent is the same in all its runs."""
BlockHashes = tuple[BlockHash, ...]


class AgentPrompts:
    """The forecast of every agent with the block hashes of its fixed prompt. Owned by the scheduler."""

    def __init__(
        self, block_size: int, forecast_ttl: float, on_forecast: Callable[[Changes], None] = lambda _: None
    ) -> None:
        """Begin without forecasts. `on_forecast` is called with their changes."""
        self._block_size, self._on_forecast = block_size, on_forecast
        self._board = ForecastBoard(forecast_ttl)
        self._lengths = FixedLengths(block_size)
        self.steps: dict[AgentKey, NextRun] = {}
        self.prompts: dict[AgentKey, BlockHashes] = {}
        self._templates: BoundedDict[AgentTemplate, BlockHashes] = BoundedDict()
        self._template_of: dict[AgentKey, AgentTemplate] = {}
        self._pools: tuple[BlockPool, ...] = ()
        self.changed = False
        """Whether forecasts or fixed prompts have changed since the last look for prefetches"""
        self._ignored_labels = 0

    def bind(self, *pools: BlockPool) -> None:
        """Set the pools whose blocks are owned by agents, the device's first. They have a `StepFreeQueue` each."""
        self._pools = pools

    def counters(self) -> Counter[str]:
        """Return what was ignored since the start."""
        ignored = self._board.ignored
        return Counter(ignored_labels=self._ignored_labels, ignored_forecasts=ignored)

    # forecasts ------------------------------------------------------------------------------------------------

    def forecast(self, hinted: HintedRequest, steps: Mapping[Any, NextRun]) -> bool:
        """Take the forecast of a run. One without a sequence number is newer than the one before it.

        Returns whether it replaced the one before.
        """
        run, workflow = hinted.request.run_key, hinted.request.workflow
        known = self._board.forecast(run)
        newer = known.seq + 1 if known else 0
        seq = newer if hinted.seq is None else hinted.seq
        changes = self._board.update(run, seq, steps, time.monotonic())
        for key in changes:
            if key.run == run and key not in self._template_of:
                self._template_of[key] = (*run[:2], workflow, key.agent)
        self._apply(changes)
        return self._board.forecast(run) is not known

    def expect(self, forecasts: FoundForecasts) -> None:
        """Take the changes of forecasts that were found, not given, with the teams of agents that are new in them."""
        if (found := forecasts.take()) is None:
            return
        for key, team in found.teams.items():
            self._template_of.setdefault(key, (key.namespace, key.client_id, team, key.agent))
        self._apply(found.next_runs)

    def end_run(self, run: RunKey) -> None:
        """Drop the forecast of a run that is over."""
        self._apply(self._board.done(run, time.monotonic()))

    def expire(self) -> None:
        """Drop the forecasts that are too old."""
        if changes := self._board.expire(time.monotonic()):
            self._apply(changes)

    def _apply(self, changes: Changes) -> None:
        self._on_forecast(changes)
        for key, next_run in changes.items():
            if next_run is None:
                self.steps.pop(key, None)
                self.prompts.pop(key, None)
                self._template_of.pop(key, None)
            else:
                self.steps[key] = next_run
        for pool in self._pools:
            pool.free_block_queue.on_forecast(changes)
        for key in changes:
            if key in self.steps and key not in self.prompts and self._pools:
                template = self._template_of.get(key)
                hashes = self._templates.get(template) if template else None
                if hashes is not None:  # one that has not called in this run has the fixed prompt of other runs
                    self.prompts[key] = hashes
                    for pool in self._pools:
                        own_prefix(pool, hashes, key)
        self.changed = True

    # prompts --------------------------------------------------------------------------------------------------

    def label(
        self, hinted: HintedRequest, request: Request, block_ids: list[int], others: Sequence[int] = ()
    ) -> AgentKey | None:
        """Give the blocks of a finished request to its agent, while the request holds them; `others` are those of other
        groups than the main one.

        Those of the fixed prompt belong to the agent, the others follow it. Returns the agent, or None where nothing
        was labelled.
        """
        asked, key = hinted.request, hinted.request.agent_key
        length = self._lengths.of(asked, request.block_hashes)
        if not length or not self._pools:
            return None
        fixed = length // self._block_size
        template: AgentTemplate = (asked.namespace, key.client_id, asked.workflow, asked.agent)
        hashes = tuple(request.block_hashes[:fixed])
        self._templates[template] = hashes
        if request.abort_immediately:
            return None  # a message without a pass: the forecast that follows it adopts the prompt
        queue = self._pools[0].free_block_queue
        if not queue.has_step(key):
            self._ignored_labels += 1
            return None
        self.prompts[key], self._template_of[key] = hashes, template
        queue.own(block_ids[:fixed], key)
        if others:
            own_prefix(self._pools[0], hashes, key)
        queue.mark_suffix((*block_ids[fixed:], *others))
        self.changed = True
        return key

    def clear(self) -> None:
        """Forget all fixed prompts. Forecasts stay."""
        self.prompts.clear()
        self._templates.clear()
