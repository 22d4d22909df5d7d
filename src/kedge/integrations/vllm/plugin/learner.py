"""Translation on one rank: verdicts from its anchors and base KV, writes, and learning from captured prompts.

KV is written into vLLM's pages once its request is admitted. A prompt of an agent that runs next is drafted as far as
it is known before its request arrives, value by value, in the time for learning: a request that begins with the same
segments needs only what is new in it to be looked up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from kedge.anchors.base_store import BaseStore
from kedge.anchors.store import AnchorStore
from kedge.anchors.translator import translate_into
from kedge.integrations.vllm.plugin.pages import Pages, RotationCheck
from kedge.integrations.vllm.plugin.requests import Capture, TranslationQuery, TranslationVerdict, TranslationWrite
from kedge.integrations.vllm.plugin.settings import OTHERS, PluginSettings
from kedge.kv.segment import KVSegment
from kedge.reuse.ahead import Ended, ExpectedPrompt, ExpectedPrompts
from kedge.reuse.costs import EngineCosts
from kedge.reuse.learning import Backlog
from kedge.reuse.plan import NOT_WORTH_IT, ReusePlan
from kedge.reuse.runtime import BaseNeed, ReadKV, Runtime
from kedge.structures.bounded import BoundedDict
from kedge.types import (
    GenerateRequest,
    Miss,
    Namespace,
    RequestId,
    RunKey,
    SampleId,
    Source,
    Span,
    TenantId,
    Tokens,
    ValueKind,
)

_NO_SAMPLE = SampleId(ValueKind.INPUT, "")
"""For the beginning of a prompt, which is identified by its tokens alone"""
MAX_CAPTURED = 8
"""Prompts that may be kept to be learned from"""
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class DraftedPrompt(ExpectedPrompt):
    """An expected prompt of one rank."""

    exact: int
    """Leading tokens whose exact KV is at hand: those of its first segment"""
    seconds: float = 0.0
    """Time that was spent on it"""


class DraftedPrompts(ExpectedPrompts[DraftedPrompt]):
    """All expected prompts of one rank."""

    def __init__(
        self, runtime: Runtime, exact_of: Callable[[GenerateRequest], int], clock: Callable[[], float]
    ) -> None:
        """`exact_of` returns how many leading tokens of a prompt have exact KV at hand. `clock` is in seconds."""
        super().__init__()
        self._runtime, self._exact_of, self._clock = runtime, exact_of, clock

    def begin(self, request: GenerateRequest) -> DraftedPrompt | None:
        exact = self._exact_of(request)
        return DraftedPrompt(exact, request=request) if exact else None

    @property
    def is_due(self) -> bool:
        """Whether there is something to do for `prepare`."""
        return any(map(self._can_advance, self.expected.values()))

    def _can_advance(self, prompt: DraftedPrompt) -> bool:
        """Return whether more of a prompt is known, and can be decided: what lacks base KV would be computed."""
        drafted = prompt.draft.drafted if prompt.draft else 0
        return prompt.drafts_on and self._runtime.has_bases(prompt.request, range(drafted, prompt.next_stop))

    def prepare(self) -> bool:
        """Draft one value of one prompt. Returns False where nothing is left to do."""
        found = next(filter(self._can_advance, self.expected.values()), None)
        if found is None:
            return False
        began = self._clock()
        try:
            found.draft = found.draft or self._runtime.planner.draft(
                found.request, (Span(0, found.exact, Source.DEVICE),)
            )
            self._runtime.planner.grow(found.draft, found.request, found.next_stop, again=True)
        except Exception:
            logger.exception("a prompt of agent %s was not prepared", found.request.agent)
            self.drop(found, Ended.FAILED)
            return True
        found.seconds += self._clock() - began
        if found.draft.dense:  # what is computed needs no preparation
            self.drop(found, Ended.WASTED)
        return True


@dataclass(frozen=True, slots=True)
class PlannedWrite:
    """The KV to be written for a request that can be translated."""

    plan: ReusePlan
    head: KVSegment | None
    """The exact KV of its first prefix segment, which has the same positions in every prompt of its agent"""
    seconds: float
    """Time that all this has taken so far"""


class Learner:
    """The `Runtime` of one rank. Between a favourable verdict and its write nothing is learned, so plans stay valid."""

    def __init__(self, pages: Pages, settings: PluginSettings, costs: EngineCosts) -> None:
        """`costs` says what is worth translating."""
        self.anchors = AnchorStore(settings.anchors)
        self.bases = BaseStore(settings.anchors.max_base_bytes, pages.bytes_per_token)
        for tenant, quota in settings.quotas.items():
            self.anchors.limit(None if tenant == OTHERS else TenantId(tenant), quota.anchor_bytes)
        self._runtime = Runtime(self.anchors, self.bases, settings.planner, None, costs)
        self.pages, self._costs, self._translate_into = pages, costs, translate_into(pages)
        # Without the time in which a pass under way was waited for: the device was at work then anyway.
        self._clock = lambda: time.monotonic() - self.anchors.waited
        self.expected = DraftedPrompts(self._runtime, self._known, self._clock)
        self.planned: dict[RequestId, PlannedWrite] = {}
        """Of requests that are not admitted yet"""
        self._written: BoundedDict[RequestId, PlannedWrite] = BoundedDict()
        """Of prompts in which something is translated, until they are captured"""
        self._answer_seconds = 0.0
        """What keeping the last answer took"""
        self._needs: BoundedDict[tuple[Namespace, Tokens], BaseNeed] = BoundedDict()
        self._harvests: BoundedDict[RequestId, None] = BoundedDict()
        """Requests that are learned from once they are captured: others leave only base KV"""
        self._room = settings.anchors.max_base_bytes // pages.bytes_per_token
        self.captured = Backlog[GenerateRequest](
            self._runtime.end_run, lambda one: not self._runtime.needs(one), lambda _: None, self._room
        )
        """Prompts to be learned from: few, as steps look through them, and with as much KV as base KV at most"""
        self.is_at_rest = True
        """Whether nothing has come since nothing could be prepared or learned: then no step looks for it again"""
        self.rotation = RotationCheck(pages.rounding)

    # before a request is admitted -------------------------------------------------------------------------------

    def judge(self, query: TranslationQuery) -> TranslationVerdict:
        """Return what of a prompt has to be computed, and which base KV would help."""
        began, request = self._clock(), query.request
        refusal = self.rotation.refusal
        if not (refusal or self._runtime.pays(request)):
            return TranslationVerdict((range(request.prompt_tokens),), (NOT_WORTH_IT,))
        is_read = self.rotation.is_open and not query.has_waited
        wanted = self._note(self._runtime.needs(request, is_new=True)) if is_read else ()
        if refusal:
            self._note_harvest(request, wanted=self.rotation.is_open and not request.guard.held_out)
            return TranslationVerdict((range(request.prompt_tokens),), (Miss("*", refusal),), wanted)
        if query.may_wait:
            needs = self._runtime.prerequisites(request, max(query.exact, self._known(request)), of_later_readers=True)
            if first := self._note(needs):
                return TranslationVerdict((range(request.prompt_tokens),), needs=wanted, awaits=first)
        return self._planned(query, wanted, began)

    def _head(self, request: GenerateRequest) -> KVSegment | None:
        """Return the KV of a prompt's first segment; None where it is not known, a value or all of the prompt."""
        first = request.segments[0]
        if first.is_placeholder or len(request.segments) == 1:
            return None
        entry = self.bases.find(request.run_key, _NO_SAMPLE, first.tokens, ())
        return entry.kv if entry else None

    def _known(self, request: GenerateRequest) -> int:
        """Return how many leading tokens of a prompt are known by its first segment."""
        head = self._head(request)
        return head.tokens if head else 0

    def _note(self, needs: Iterable[BaseNeed]) -> tuple[Tokens, ...]:
        """Keep needed base prefills until they are captured. Returns their prompts."""
        by_prompt = {(need.namespace, need.tokens): need for need in needs}
        self._needs.update(by_prompt)
        return tuple(tokens for _, tokens in by_prompt)

    def _planned(self, query: TranslationQuery, wanted: tuple[Tokens, ...], began: float) -> TranslationVerdict:
        """Plan a prompt, and keep the plan for its write where something is translated."""
        request, head = query.request, self._head(query.request)
        exact = max(query.exact, head.tokens if head else 0)
        found, ready = self.expected.claim(request), 0
        if found is None or found.draft is None or found.exact > exact or found.draft.is_outdated:
            plan, seconds = self._runtime.plan(request, (Span(0, exact, Source.DEVICE),) if exact else ()), 0.0
        else:  # going on from what was prepared of it
            ready, seconds = len(found.draft.sources), found.seconds
            self._runtime.planner.grow(found.draft, request, len(request.segments), again=True)
            plan = self._runtime.planner.seal(found.draft)
            self._runtime.use(plan)
        holes = plan.holes
        self._note_harvest(request, wanted=self._runtime.wants_harvest(request, plan))
        if not plan.translates or (len(holes) == 1 and holes[0].start <= query.exact):
            return TranslationVerdict((range(request.prompt_tokens),), plan.misses, wanted)
        # where a request begins a step later, that counts as the smallest of passes
        seconds += self._clock() - began + (self._costs.pass_seconds(1, 1) if query.delays else 0.0)
        self.planned[request.request_id] = PlannedWrite(plan, head, seconds)
        return TranslationVerdict(holes, plan.misses, wanted, ready=ready)

    def _note_harvest(self, request: GenerateRequest, *, wanted: bool) -> None:
        self._harvests.pop(request.request_id, None)
        if wanted:
            self._harvests[request.request_id] = None

    # around a pass ----------------------------------------------------------------------------------------------

    def write(self, order: TranslationWrite) -> None:
        """Write the KV that was planned for a request. Raises `KeyError` for a request without any."""
        began = time.monotonic()
        planned, table = self.planned.pop(order.request_id), self.pages.table(order.blocks, only=order.spans)
        start, stop = order.spans[0].start, order.spans[-1].stop
        if planned.head is not None and start < planned.head.tokens:
            self.pages.write(table, start, planned.head.slice(start, min(stop, planned.head.tokens)), None)
        found = (one.within(start, stop) for one in planned.plan.translations)
        self._translate_into(table, [part for part in found if part is not None])
        self._written[order.request_id] = replace(planned, seconds=planned.seconds + time.monotonic() - began)

    def drop(self, request_id: RequestId) -> None:
        """Forget what is planned for a request, if anything is."""
        self.planned.pop(request_id, None)
        self._written.pop(request_id, None)

    def capture(self, order: Capture) -> None:
        """Read the KV of a response after its pass, or what others need of a prompt: all of it where it is learned
        from. Reading prompts and answers for those that read them later is a part of what translating costs.
        """
        if not (self.rotation.is_open and self._is_of_use(order)):
            return
        began, request, table = time.monotonic(), order.request, self.pages.table(order.blocks)
        start, self.is_at_rest = request.prompt_tokens + order.reasoning, False
        if order.response:
            kv = self.pages.read(table, start, start + order.known)
            self._runtime.keep_response(request, order.response, kv)
            self._answer_seconds = time.monotonic() - began
        elif need := self._needs.pop((request.namespace, request.tokens), None):
            need.keep(partial(self.pages.read, table))
        elif request.wants_translation:
            read: ReadKV = partial(self.pages.read, table)
            written = self._written.pop(request.request_id, None)
            plan = written.plan if written else None
            if order.is_translated and plan is None:  # its write has failed, or its request was dropped before
                return
            if plan is None and not self.rotation.is_checked:
                self.rotation.check(request.tokens, read(0, request.prompt_tokens))
            first = request.segments[0]
            if first.tokens and not first.is_placeholder and self._head(request) is None:
                self.bases.put_content(request.namespace, first.tokens, (), read(0, len(first.tokens)))
            self._runtime.keep_base(request, read, plan)
            is_wanted = request.request_id in self._harvests and self._runtime.may_observe(request, plan)
            self._harvests.pop(request.request_id, None)
            size = max(request.prompt_tokens, self._room // MAX_CAPTURED)
            if is_wanted and self.captured.has_room(size):
                steps = self._runtime.observe(request, read(0, request.prompt_tokens).slice, plan)
                self.captured.add(request, request.run_key, steps, size)
            if written:
                taken = written.seconds + self._answer_seconds + time.monotonic() - began
                plan = written.plan
                self._costs.observe_translation(len(plan.translations), plan.translated_tokens, taken)

    def _is_of_use(self, order: Capture) -> bool:
        """Return whether something of a prompt or response may be translated in others, or teaches how."""
        if order.response:
            return self._costs.translation_pays(order.known, order.known)
        asked = order.request
        return order.is_translated or (asked.namespace, asked.tokens) in self._needs or self._runtime.pays(asked)

    # learning -----------------------------------------------------------------------------------------------------

    @property
    def is_learning(self) -> bool:
        """Whether a prompt can be prepared, or learned from as its base KV is there and no write is planned."""
        return not self.is_at_rest and (self.expected.is_due or (not self.planned and self.captured.ready))

    def settle(self) -> None:
        """Wait for the pass under way, where `learn` would have to."""
        if self.is_learning:
            self.pages.synchronize()

    def learn(self) -> bool:
        """Prepare one value of an expected prompt, or else measure the offsets of one segment of a captured prompt. No
        offsets are measured while a write is planned.

        Returns False if there is nothing of this to be done now.
        """
        if self.is_at_rest:
            return False
        if self.expected.prepare():
            return True
        if self.planned:
            return False
        self.is_at_rest = not self.captured.step()
        return not self.is_at_rest

    def expect(self, request: GenerateRequest) -> None:
        """Take the prompt of an agent that runs next, as far as it is known."""
        self.is_at_rest = False
        self.expected.expect(request)

    def end_run(self, run: RunKey) -> None:
        """Forget what the agents of a run shared, once nothing is left to learn from it."""
        self.expected.end_run(run)
        self.captured.end_run(run)

    def clear(self) -> None:
        """Forget all anchors and all base KV, and what was planned by them."""
        for found in (self.expected, self._runtime, self.captured, self.planned, self._written, self._needs):
            found.clear()
