"""A rank's half of translation: its anchors and base KV, what they say of a prompt, and what they learn from one."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from kedge.anchors.base_store import BaseStore
from kedge.anchors.store import AnchorStore
from kedge.anchors.translator import Translator
from kedge.errors import TranslationRefused
from kedge.integrations.vllm.plugin.messages import Ask, Capture, Verdict, Write
from kedge.integrations.vllm.plugin.pages import Pages, rotation_error
from kedge.integrations.vllm.plugin.settings import PluginSettings
from kedge.kv.segment import KVSegment
from kedge.reuse.contracts import BaseNeed
from kedge.reuse.layout import Placed
from kedge.reuse.plan import ReusePlan
from kedge.reuse.runtime import Runtime
from kedge.types import (
    GenerateRequest,
    Miss,
    Namespace,
    RequestId,
    RunKey,
    SampleId,
    Source,
    Span,
    Tokens,
    ValueKind,
)

logger = logging.getLogger(__name__)
MOST_NEEDS = 1024
"""Base prefills that may be waited for; what was asked for longest ago goes first."""
_HEAD = SampleId(ValueKind.INPUT, "")
"""No sample: the beginning of a prompt is known by its tokens alone"""
ROUNDING = 0.05
"""Relative difference of keys that is rounding of a half type and no other rotation"""


@dataclass(eq=False, slots=True)
class _Harvest:
    """A densely prefilled prompt that is to be learned from, with its real KV, keys unrotated."""

    request: GenerateRequest
    kv: KVSegment
    steps: Iterator[Placed] | None = None
    """What is left to be measured, once it has begun"""


@dataclass(frozen=True, slots=True)
class _Admission:
    """What is to be written for a request that got a favourable verdict."""

    plan: ReusePlan
    head: KVSegment | None
    """The exact KV of its first prefix segment, which lies at the same positions in every prompt of its agent"""


class Learner:
    """The `Runtime` of one rank. Between a favourable verdict and its write nothing is learned, so plans stay good."""

    def __init__(self, pages: Pages, settings: PluginSettings) -> None:
        self._bases = BaseStore(settings.anchors.max_base_bytes)
        anchors, planner = settings.translation_only
        self._runtime = Runtime(AnchorStore(anchors), self._bases, planner, None)
        self._pages, self._translator = pages, Translator(pages)
        self._min_translated = settings.planner.min_translated
        self._plans: dict[RequestId, _Admission] = {}
        self._needs: OrderedDict[tuple[Namespace, Tokens], BaseNeed] = OrderedDict()
        self._harvests: deque[_Harvest] = deque(maxlen=settings.max_captures)
        self._ended_runs: list[RunKey] = []
        self._refusal: str | None = "its rotary embedding has not been checked yet"

    # before a request is admitted -------------------------------------------------------------------------------

    def judge(self, ask: Ask) -> Verdict:
        """How much of a prompt is exact or translatable without a gap, and what base KV would help."""
        needs = self._runtime.needs(ask.request)
        for need in needs:
            self._remember(need)
        wanted = tuple(need.tokens for need in needs)
        if self._refusal:
            return Verdict(0, (Miss("*", self._refusal),), wanted)
        head = self._head(ask.request)
        exact = max(ask.exact, head.tokens if head else 0)
        plan = self._runtime.plan(ask.request, (Span(0, exact, Source.DEVICE),) if exact else ())
        share = (plan.unbroken - ask.exact) / (ask.request.prompt_tokens - ask.exact)
        if not plan.translates:
            return Verdict(0, plan.misses, wanted)
        if share < self._min_translated:
            few = Miss("*", f"only {share:.0%} of the prompt could be translated without a gap")
            return Verdict(0, (*plan.misses, few), wanted)
        self._plans[ask.request.request_id] = _Admission(plan, head)
        return Verdict(plan.unbroken, plan.misses, wanted)

    def _head(self, request: GenerateRequest) -> KVSegment | None:
        """The KV of the first prefix segment: vLLM has its full blocks only, and perhaps not any more."""
        first = request.segments[0]
        if first.is_placeholder or len(request.segments) == 1:
            return None
        entry = self._bases.find(request.run_key, _HEAD, first.tokens, ())
        return entry.kv if entry else None

    def _remember(self, need: BaseNeed) -> None:
        self._needs[need.namespace, need.tokens] = need
        if len(self._needs) > MOST_NEEDS:
            self._needs.popitem(last=False)

    def drop(self, request_id: RequestId) -> None:
        """The plan for a request, if there is one, will not be used."""
        self._plans.pop(request_id, None)

    # around a pass ----------------------------------------------------------------------------------------------

    def write(self, order: Write) -> None:
        """Translates what the request was admitted with. Raises `KeyError` without a plan for it."""
        admission, table = self._plans.pop(order.request_id), self._pages.table(order.blocks)
        if admission.head is not None and order.start < admission.head.tokens:
            self._pages.put(table, order.start, admission.head.slice(order.start))
        parts = (translation.within(order.start, order.stop) for translation in admission.plan.translations)
        self._translator.write(table, [part for part in parts if part])

    def capture(self, order: Capture) -> None:
        """Reads what a pass, or a whole response, has left behind."""
        request, table = order.request, self._pages.table(order.blocks)
        start = request.prompt_tokens
        if order.response:
            kv = self._pages.read(table, start, start + len(order.response))
            self._runtime.keep_response(request, order.response, kv, exact=order.exact)
        elif need := self._needs.pop((request.namespace, request.tokens), None):
            for cut in need.cuts:
                cut.keep(self._pages.read(table, cut.start, cut.stop))
        elif any(segment.is_placeholder for segment in request.segments):
            kv = self._pages.read(table, 0, start)
            self._check_rotation(request.tokens, kv)
            self._keep_head(request, kv)
            self._harvests.append(_Harvest(request, kv))

    def _keep_head(self, request: GenerateRequest, kv: KVSegment) -> None:
        first = request.segments[0]
        if first.tokens and not first.is_placeholder and self._head(request) is None:
            self._bases.put_content(request.namespace, first.tokens, (), kv.slice(0, len(first.tokens)))

    def _check_rotation(self, tokens: Tokens, kv: KVSegment) -> None:
        error = rotation_error(tokens, kv.keys[0]) if self._refusal else None
        if error is None:
            return
        good = error < ROUNDING
        self._refusal = None if good else "its rotary embedding is another one than Kedge's"
        if not good:
            logger.warning("translation is off: %s (keys of equal tokens differ by %.2f)", self._refusal, error)

    # learning -----------------------------------------------------------------------------------------------------

    @property
    def learning(self) -> bool:
        """Whether something can be learned now: its base KV is there."""
        return any(self._ready(harvest) for harvest in self._harvests)

    def _ready(self, harvest: _Harvest) -> bool:
        return harvest.steps is not None or not self._runtime.needs(harvest.request)

    def learn(self) -> None:
        """One piece of learning: measures the offsets of one segment of a prompt."""
        harvest = next((one for one in self._harvests if self._ready(one)), None)
        if harvest is None or self._plans:
            return
        harvest.steps = harvest.steps or self._runtime.observe(harvest.request, harvest.kv.slice)
        if not self._observe(harvest):
            self._harvests.remove(harvest)
            self._forget_ended_runs()

    @staticmethod
    def _observe(harvest: _Harvest) -> bool:
        """False where nothing is left, or where offsets cannot be kept (which changes no pool)."""
        assert harvest.steps is not None
        try:
            return next(harvest.steps, None) is not None
        except TranslationRefused as refusal:
            logger.warning("request %s is not learned from: %s", harvest.request.request_id, refusal)
            return False

    def end_run(self, run: RunKey) -> None:
        """Forgets what a run shared, once nothing is left to learn from it."""
        self._ended_runs.append(run)
        self._forget_ended_runs()

    def _forget_ended_runs(self) -> None:
        learning = {harvest.request.run_key for harvest in self._harvests}
        for one in [one for one in self._ended_runs if one not in learning]:
            self._runtime.end_run(one)
            self._ended_runs.remove(one)

    def clear(self) -> None:
        """Forgets all anchors and all base KV."""
        self._runtime.clear()
        self._harvests.clear()
