"""Writing prompts before their requests arrive, piece by piece: blocks, translated segments, positions to compute."""

from __future__ import annotations

import time
from collections import deque

from kedge.anchors.translator import Translate
from kedge.cache import CacheManager, Readiness
from kedge.engine.local.sentinels import Sentinels
from kedge.engine.local.sequence import PreparedPrompt
from kedge.errors import OutOfBlocks
from kedge.kv.storage import SlotTable
from kedge.reuse.costs import EngineCosts
from kedge.reuse.layout import layout
from kedge.reuse.planner import Draft
from kedge.reuse.runtime import Runtime

NEAR = 1.0
"""Steps-to-execution up to which prompts are assembled ahead; for them only KV that is needed later is evicted."""


class PromptWriter:
    """The writer of prepared prompts. `queue` gets those that have tokens to compute."""

    def __init__(
        self,
        cache: CacheManager,
        runtime: Runtime,
        translate: Translate,
        block_size: int,
        queue: deque[PreparedPrompt],
        costs: EngineCosts,
        sentinels: Sentinels,
    ) -> None:
        self._cache, self._runtime, self._translate_into, self._block_size = cache, runtime, translate, block_size
        self._ahead, self._costs, self._sentinels = queue, costs, sentinels
        self.begun = 0
        """Number of prompts that got blocks."""
        self.wasted_tokens = 0
        """Tokens translated or computed for prompts that then had to be computed densely."""

    def begin(self, preparation: PreparedPrompt) -> bool:
        """Lock the exact prefix and lease blocks. Returns False without room, or while a part is being loaded."""
        space, tokens, limit = preparation.namespace, preparation.tokens, preparation.exact_limit
        if self._cache.status(space, tokens[:limit]).readiness is Readiness.LOADING:
            return False
        try:
            lease = self._cache.admit(preparation.key, space, tokens, limit, len(tokens), NEAR)
        except OutOfBlocks:
            return False
        preparation.table = SlotTable.of(lease.blocks, self._block_size)
        preparation.draft = self._runtime.draft(preparation.request, lease.spans)
        self.begun += 1
        return True

    def advance(self, preparation: PreparedPrompt) -> bool:
        """Draft to the end of the next placeholder's prefix segment. Returns False without room."""
        placed, segments = layout(preparation.request), preparation.next_stop
        if not self.extend(preparation, placed[segments - 1].stop, NEAR):
            return False
        assert preparation.table is not None
        self.grow(preparation, preparation.table, segments)
        if preparation.todo and preparation not in self._ahead:
            self._ahead.append(preparation)
        return True

    def grow(self, preparation: PreparedPrompt, table: SlotTable, segments: int) -> None:
        """Draft and write the first `segments`, and seal the plan if these are all."""
        draft, request = preparation.draft, preparation.request
        assert draft is not None
        before, translated, made = len(draft.sources), preparation.translates, preparation.made
        if segments > draft.drafted:
            self._translate(preparation, table, draft, segments)
        if preparation.plan is None and segments == len(request.segments):
            preparation.plan = self._runtime.seal(draft, request)
        if draft.dense:
            preparation.sentinels.clear()
        if translated and draft.dense:  # what was written and computed beside it must not be seen
            preparation.todo, before = [], draft.exact_tokens
            self.wasted_tokens += made
        preparation.todo += draft.computed(before)
        if preparation.plan is not None:
            preparation.todo = [at for at in preparation.todo if at < request.prompt_tokens - 1]

    def _translate(self, preparation: PreparedPrompt, table: SlotTable, draft: Draft, segments: int) -> None:
        began, posted = time.monotonic(), len(draft.sentinels)
        translations = self._runtime.grow(draft, preparation.request, segments)
        self._translate_into(table, translations)
        if new := draft.sentinels[posted:]:
            preparation.sentinels.append(self._sentinels.read(table, new))
        if translations:
            tokens = sum(one.tokens for one in translations)
            self._costs.observe_translation(len(translations), tokens, time.monotonic() - began)

    def extend(self, preparation: PreparedPrompt, room: int, steps: float | None = None) -> bool:
        """Give a prompt blocks for `room` tokens; `steps` as for `CacheManager.admit`. Returns False without room."""
        try:
            lease = self._cache.extend(preparation.key, room, steps)
        except OutOfBlocks:
            return False
        preparation.table = SlotTable.of(lease.blocks, self._block_size)
        return True
