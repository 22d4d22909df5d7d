"""Translated KV that is written into vLLM's pages once its request is admitted.

What several planned requests have in common, as the choices of one call, is translated for the first of them; the
others store the same KV.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kedge.anchors.translator import is_same, translate_into
from kedge.integrations.vllm.plugin.expected_prompts import ReadyPart, translated
from kedge.integrations.vllm.plugin.messages import TranslationWrite
from kedge.integrations.vllm.plugin.pages import Pages
from kedge.kv.segment import KVSegment
from kedge.kv.storage import SlotTable
from kedge.policies.balance import Balances
from kedge.reuse.costs import EngineCosts
from kedge.reuse.plan import ReusePlan, Translation
from kedge.structures.bounded import BoundedDict
from kedge.types import GenerateRequest, RequestId

MAX_WRITTEN = 1024
"""Plans that are kept until their prompts are captured; requests that are aborted before leave them behind"""


@dataclass(frozen=True, slots=True)
class PlannedWrite:
    """The KV to be written for a request that can be translated."""

    request: GenerateRequest
    plan: ReusePlan
    head: KVSegment | None
    """The exact KV of its first prefix segment, which has the same positions in every prompt of its agent"""
    ready: Mapping[int, Sequence[ReadyPart]]
    """What was translated before the request arrived, by the first position of its translation"""
    seconds: float
    """Time that all this took"""
    shared: dict[int, Sequence[ReadyPart]] = field(default_factory=dict)
    """What was translated for another request since, by the first position of its translation"""

    def writes(self, translation: Translation) -> bool:
        """Return whether it writes the same KV to the same positions."""
        return any(is_same(one, translation) for one in self.plan.translations)


class PlannedWrites:
    """The planned writes of one rank, until their requests are admitted."""

    def __init__(self, pages: Pages, costs: EngineCosts, balances: Balances, max_shared: int = 0) -> None:
        """`costs` observes what translations take, `balances` what they take and save. KV that is translated for
        several requests takes at most `max_shared` bytes until all of them are admitted.
        """
        self._pages, self._costs, self._balances, self._translate_into = pages, costs, balances, translate_into(pages)
        self._max_shared = max_shared
        self._planned: dict[RequestId, PlannedWrite] = {}
        self._written: BoundedDict[RequestId, ReusePlan] = BoundedDict(MAX_WRITTEN)
        """The plans of prompts that are learned from although something in them is translated"""

    def __len__(self) -> int:
        return len(self._planned)

    def put(self, request_id: RequestId, planned: PlannedWrite) -> None:
        """Keep what is planned for a request."""
        self._planned[request_id] = planned

    def drop(self, request_id: RequestId) -> None:
        """Forget what is planned for a request, if anything is."""
        self._planned.pop(request_id, None)
        self._written.pop(request_id, None)

    def take_written(self, request_id: RequestId) -> ReusePlan | None:
        """Return the plan by which parts of a prompt that is learned from were translated, if any were."""
        return self._written.pop(request_id, None)

    def write(self, order: TranslationWrite) -> None:
        """Write the KV that was planned for a request. Raises `KeyError` for a request without any."""
        began = time.monotonic()
        planned, table = self._planned.pop(order.request_id), self._pages.table(order.blocks, only=order.spans)
        start, stop = order.spans[0].start, order.spans[-1].stop
        if planned.head is not None and start < planned.head.tokens:
            self._pages.put(table, start, planned.head.slice(start, min(stop, planned.head.tokens)))
        count, tokens = self._translate(planned, table, range(start, stop))
        if planned.plan.teaches:
            self._written[order.request_id] = planned.plan
        seconds = planned.seconds + time.monotonic() - began
        if not planned.shared:  # they would make it seem cheaper than it is
            self._costs.observe_translation(count, tokens, seconds)
        self._balances.save(planned.request, self._costs.added_seconds(tokens, 0))
        lanes = len(order.spans) - 1  # rows of the pass that computing the whole prompt would not have
        self._balances.spend(planned.request, seconds + self._costs.added_seconds(0, lanes))

    def _translate(self, planned: PlannedWrite, table: SlotTable, span: range) -> tuple[int, int]:
        """Write what of the translations is within `span`. Returns the number of these parts, and of their tokens."""
        count = tokens = 0
        for translation in planned.plan.translations:
            part = translation.within(span.start, span.stop)
            if part is None:
                continue
            ready = planned.ready.get(translation.start) or self._shared(planned, translation)
            for first, kv in ready:
                self._pages.store(table, first, kv)
            if not ready:
                self._translate_into(table, [part])
            count, tokens = count + 1, tokens + part.tokens
        return count, tokens

    def _shared(self, planned: PlannedWrite, translation: Translation) -> Sequence[ReadyPart]:
        """Return a translation that other requests need, too, translated for the first of them. Returns nothing where
        there are no others, or no room for it.
        """
        if found := planned.shared.get(translation.start):
            return found
        others = [one for one in self._planned.values() if not one.ready and one.writes(translation)]
        if not others or self.shared_bytes + translation.base.nbytes > self._max_shared:
            return ()
        parts = translated(self._pages, translation)
        for one in others:
            one.shared[translation.start] = parts
        return parts

    @property
    def shared_bytes(self) -> int:
        """Bytes of the KV that requests wait for which was translated for another one."""
        parts = (part for one in self._planned.values() for found in one.shared.values() for part in found)
        return sum({id(part): part.kv.nbytes for part in parts}.values())
