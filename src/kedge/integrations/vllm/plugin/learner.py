"""Translation on one rank: verdicts from its anchors and base KV, writes, and learning from captured prompts.

KV is written into vLLM's pages once its request is admitted.

A prompt of an agent that runs next is drafted and translated as far as it is known before its request arrives, value
by value, in the time for learning: its KV, with keys rotated to their places, waits outside of vLLM's pages. A request
that begins with the same segments has it stored into its blocks, and only what is new in it is matched and translated
then. Where a kernel translates, prompts are only drafted. A prompt that turns out otherwise costs that time, and
changes no answer.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from kedge.anchors.base_store import BaseStore
from kedge.anchors.store import AnchorStore
from kedge.anchors.translator import Translation, translate_into
from kedge.errors import TranslationRefused
from kedge.integrations.vllm.plugin.messages import Capture, TranslationQuery, TranslationVerdict, TranslationWrite
from kedge.integrations.vllm.plugin.pages import Pages
from kedge.integrations.vllm.plugin.rotations import UNCHECKED, RotationCheck
from kedge.integrations.vllm.plugin.settings import OTHERS, PluginSettings
from kedge.kv.segment import KVSegment
from kedge.kv.storage import SlotTable
from kedge.reuse.costs import MAX_PENDING, EngineCosts
from kedge.reuse.layout import Placed, known_segments, next_stop, plan_key
from kedge.reuse.plan import ReusePlan
from kedge.reuse.planner import Draft
from kedge.reuse.runtime import BaseNeed, ReadKV, Runtime
from kedge.settings import QuotaSettings
from kedge.structures.bounded import BoundedDict
from kedge.types import (
    AgentKey,
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
logger = logging.getLogger(__name__)
EXPECTED_SHARE = 4
"""Expected prompts may take one in so many of the bytes that base KV may take"""


_NOWHERE = SlotTable(torch.empty(0, dtype=torch.int64))


class ReadyPart(NamedTuple):
    """Translated KV for the positions from `start` on, keys rotated to them."""

    start: int
    kv: KVSegment


@dataclass(slots=True)
class ExpectedPrompt:
    """A prompt whose request has not arrived, as far as it is known."""

    request: GenerateRequest
    exact: int
    """Leading tokens whose exact KV is at hand: those of its first segment"""
    draft: Draft | None = None
    ready: dict[int, list[ReadyPart]] = field(default_factory=dict)
    """The parts of each translation, by its first position"""
    seconds: float = 0.0
    """Time that was spent on it"""

    @property
    def drafted(self) -> int:
        """Number of segments that are drafted."""
        return self.draft.drafted if self.draft else 0

    @property
    def next_segments(self) -> range:
        """The segments to be drafted next, none where no more are known."""
        if self.drafted == known_segments(self.request):
            return range(self.drafted, self.drafted)
        return range(self.drafted, next_stop(self.request, self.drafted))

    @property
    def nbytes(self) -> int:
        """Bytes of its translated KV."""
        return sum(part.kv.nbytes for parts in self.ready.values() for part in parts)

    def agrees(self, request: GenerateRequest) -> bool:
        """Return whether `request` is the expected one, as far as this is drafted."""
        return (
            plan_key(self.request) == plan_key(request)
            and self.request.segments[: self.drafted] == request.segments[: self.drafted]
        )


class ExpectedPrompts:
    """All expected prompts of one rank."""

    def __init__(
        self,
        runtime: Runtime,
        pages: Pages,
        exact_of: Callable[[GenerateRequest], int],
        max_bytes: int,
    ) -> None:
        """`exact_of` returns how many leading tokens of a prompt have exact KV at hand. Translated KV takes at most
        `max_bytes`.
        """
        self._runtime, self._pages, self._exact_of, self._max_bytes = runtime, pages, exact_of, max_bytes
        self._expected: BoundedDict[AgentKey, ExpectedPrompt] = BoundedDict(MAX_PENDING)

    def __len__(self) -> int:
        return len(self._expected)

    @property
    def nbytes(self) -> int:
        """Bytes of all translated KV."""
        return sum(one.nbytes for one in self._expected.values())

    def expect(self, request: GenerateRequest) -> None:
        """Take the hint that such a request is expected, or more of its segments; it replaces one that differs."""
        old = self._expected.get(request.agent_key)
        if old is not None and old.agrees(request):
            old.request = request
            self._expected.move_to_end(request.agent_key)
            return
        self._expected.pop(request.agent_key, None)
        if exact := self._exact_of(request):
            self._expected[request.agent_key] = ExpectedPrompt(request, exact)

    @property
    def is_due(self) -> bool:
        """Whether there is something to do for `prepare`."""
        return any(map(self._can_advance, self._expected.values()))

    def _can_advance(self, prompt: ExpectedPrompt) -> bool:
        """Return whether more of a prompt is known, and can be decided: what lacks base KV would be computed."""
        segments = prompt.next_segments
        return bool(segments) and self._runtime.has_bases(prompt.request, segments)

    def prepare(self) -> bool:
        """Draft and translate one value of one prompt. Returns False where nothing is left to do."""
        found = next(filter(self._can_advance, self._expected.values()), None)
        if found is None:
            return False
        began = time.monotonic()
        try:
            if found.draft is None:
                found.draft = self._runtime.draft(found.request, (Span(0, found.exact, Source.DEVICE),))
            for one in self._runtime.grow(found.draft, found.request, found.next_segments.stop, again=True):
                found.ready[one.start] = translated(self._pages, one)
        except Exception:
            del self._expected[found.request.agent_key]
            raise
        found.seconds += time.monotonic() - began
        if found.draft is None or found.draft.dense:  # what is computed needs no preparation
            del self._expected[found.request.agent_key]
        while self.nbytes > self._max_bytes:
            self._expected.popitem(last=False)
        return True

    def claim(self, request: GenerateRequest, exact: int) -> ExpectedPrompt | None:
        """Return the prompt of a request that has arrived, of which `exact` leading tokens have exact KV, if what was
        drafted of it holds. It is expected no longer.
        """
        found = self._expected.pop(request.agent_key, None)
        return found if found and found.draft and found.exact <= exact and found.agrees(request) else None

    def end_run(self, run: RunKey) -> None:
        """Forget the prompts of a run."""
        for key in [key for key, one in self._expected.items() if one.request.run_key == run]:
            del self._expected[key]

    def clear(self) -> None:
        """Forget all prompts."""
        self._expected.clear()


def translated(pages: Pages, translation: Translation) -> list[ReadyPart]:
    """Return what a translation writes, outside of the pages; nothing where a kernel translates it as fast as it would
    copy this.
    """
    if pages.kernel_slots is not None:
        return []
    parts = _Parts(pages)
    translate_into(parts)(_NOWHERE, [translation])
    return parts.found


class _Parts:
    """A `Storage` that keeps what is written into it."""

    kernel_slots = None

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self.found: list[ReadyPart] = []

    def write(self, table: SlotTable, start: int, base: KVSegment, offsets: KVSegment | None) -> None:  # noqa: ARG002
        self.found.append(ReadyPart(start, self._pages.translated(start, base, offsets)))


@dataclass(frozen=True, slots=True)
class PlannedWrite:
    """The KV to be written for a request that can be translated."""

    plan: ReusePlan
    head: KVSegment | None
    """The exact KV of its first prefix segment, which has the same positions in every prompt of its agent"""
    ready: Mapping[int, Sequence[ReadyPart]]
    """What was translated before the request arrived, by the first position of its translation"""
    seconds: float
    """Time that all this took"""


class PlannedWrites:
    """The planned writes of one rank, until their requests are admitted."""

    def __init__(self, pages: Pages, costs: EngineCosts) -> None:
        """`costs` observes what translations take."""
        self._pages, self._costs, self._translate_into = pages, costs, translate_into(pages)
        self._planned: dict[RequestId, PlannedWrite] = {}
        self._written: BoundedDict[RequestId, ReusePlan] = BoundedDict()
        """The plans of prompts in which something is translated, until they are captured"""

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
        """Return the plan by which parts of a captured prompt were translated; None: all of it was computed."""
        return self._written.pop(request_id, None)

    def write(self, order: TranslationWrite) -> None:
        """Write the KV that was planned for a request. Raises `KeyError` for a request without any."""
        began = time.monotonic()
        planned, table = self._planned.pop(order.request_id), self._pages.table(order.blocks, only=order.spans)
        start, stop = order.spans[0].start, order.spans[-1].stop
        if planned.head is not None and start < planned.head.tokens:
            self._pages.write(table, start, planned.head.slice(start, min(stop, planned.head.tokens)), None)
        count, tokens = self._translate(planned, table, range(start, stop))
        self._written[order.request_id] = planned.plan
        # a request that is asked about begins a step later, which counts as the smallest of passes
        asking = self._costs.pass_seconds(1, 1)
        self._costs.observe_translation(count, tokens, asking + planned.seconds + time.monotonic() - began)

    def _translate(self, planned: PlannedWrite, table: SlotTable, span: range) -> tuple[int, int]:
        """Write what of the translations is within `span`. Returns the number of these parts, and of their tokens."""
        count = tokens = 0
        for translation in planned.plan.translations:
            part = translation.within(span.start, span.stop)
            if part is None:
                continue
            ready = planned.ready.get(translation.start, ())
            for first, kv in ready:
                self._pages.store(table, first, kv)
            if not ready:
                self._translate_into(table, [part])
            count, tokens = count + 1, tokens + part.tokens
        return count, tokens


@dataclass(eq=False, slots=True)
class _CapturedPrompt:
    """A prompt that is to be learned from, with its KV, keys unrotated."""

    request: GenerateRequest
    kv: KVSegment
    plan: ReusePlan | None = None
    """What was translated in it, where anything was: that teaches nothing"""
    steps: Iterator[Placed] | None = None
    """Segments that are still to be measured, once learning has begun"""


class Learner:
    """The `Runtime` of one rank. Between a favourable verdict and its write nothing is learned, so plans stay valid."""

    def __init__(self, pages: Pages, settings: PluginSettings, costs: EngineCosts) -> None:
        """`costs` says what is worth translating."""
        self._bases = BaseStore(settings.anchors.max_base_bytes)
        self.learned = limited(AnchorStore(settings.anchors), settings.quotas), self._bases
        """All anchors and all base KV"""
        self._runtime = Runtime(*self.learned, settings.planner, None, costs)
        self.pages = pages
        most = settings.anchors.max_base_bytes // EXPECTED_SHARE
        self._expected = ExpectedPrompts(self._runtime, pages, self._known, most)
        self.writes = PlannedWrites(pages, costs)
        self._needs: BoundedDict[tuple[Namespace, Tokens], BaseNeed] = BoundedDict()
        self._harvests: BoundedDict[RequestId, None] = BoundedDict()
        """Requests that are learned from once they are captured: others leave only base KV"""
        self._captured: deque[_CapturedPrompt] = deque(maxlen=settings.max_captures)
        self._ended_runs: list[RunKey] = []
        self.is_at_rest = True
        """Whether nothing has come since nothing could be prepared or learned: then no step looks for it again"""
        self.rotation = RotationCheck(pages.rounding)

    # before a request is admitted -------------------------------------------------------------------------------

    def judge(self, query: TranslationQuery) -> TranslationVerdict:
        """Return what of a prompt has to be computed, and which base KV would help."""
        request = query.request
        wanted = () if query.has_waited else self._note(self._runtime.needs(request))
        if refusal := self.rotation.refusal:
            self._note_harvest(request, wanted=refusal is UNCHECKED and not request.guard.held_out)
            return TranslationVerdict((range(request.prompt_tokens),), (Miss("*", refusal),), wanted)
        if query.may_wait and (first := self._prerequisites(query)):
            return TranslationVerdict((range(request.prompt_tokens),), needs=wanted, awaits=first)
        return self._planned(query, wanted)

    def _head(self, request: GenerateRequest) -> KVSegment | None:
        """Return the KV of a prompt's first segment; None where it is not known, a value or all of the prompt."""
        first = request.segments[0]
        if first.is_placeholder or len(request.segments) == 1:
            return None
        entry = self._bases.find(request.run_key, _NO_SAMPLE, first.tokens, ())
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

    def _prerequisites(self, query: TranslationQuery) -> tuple[Tokens, ...]:
        exact = max(query.exact, self._known(query.request))
        return self._note(self._runtime.prerequisites(query.request, exact, of_later_readers=True))

    def _planned(self, query: TranslationQuery, wanted: tuple[Tokens, ...]) -> TranslationVerdict:
        """Plan a prompt, and keep the plan for its write where something is translated."""
        began = time.monotonic()
        request, head = query.request, self._head(query.request)
        exact = max(query.exact, head.tokens if head else 0)
        found = self._expected.claim(request, exact)
        ready: Mapping[int, Sequence[ReadyPart]] = {}
        if found is None or found.draft is None:
            plan, seconds = self._runtime.plan(request, (Span(0, exact, Source.DEVICE),) if exact else ()), 0.0
        else:  # going on from what was prepared of it
            self._runtime.grow(found.draft, request, len(request.segments), again=True)
            plan = self._runtime.seal(found.draft, request)
            self._runtime.use(plan)
            ready, seconds = found.ready, found.seconds
        holes = plan.holes
        self._note_harvest(request, wanted=self._runtime.wants_harvest(request, plan))
        if not plan.translates or (len(holes) == 1 and holes[0].start <= query.exact):
            return TranslationVerdict((range(request.prompt_tokens),), plan.misses, wanted)
        seconds += time.monotonic() - began
        self.writes.put(request.request_id, PlannedWrite(plan, head, ready, seconds))
        stops = (one.start + one.tokens for one in plan.translations if one.start in ready)
        return TranslationVerdict(holes, plan.misses, wanted, ready=max(stops, default=0))

    def _note_harvest(self, request: GenerateRequest, *, wanted: bool) -> None:
        self._harvests.pop(request.request_id, None)
        if wanted:
            self._harvests[request.request_id] = None

    # around a pass ----------------------------------------------------------------------------------------------

    def capture(self, order: Capture) -> None:
        """Read the KV of a response after its pass, or what others need of a prompt: all of it where it is learned
        from.
        """
        request, table = order.request, self.pages.table(order.blocks)
        start, self.is_at_rest = request.prompt_tokens, False
        if order.response:
            kv = self.pages.read(table, start, start + len(order.response))
            self._runtime.keep_response(request, order.response, kv)
        elif need := self._needs.pop((request.namespace, request.tokens), None):
            for cut in need.cuts:
                cut.keep(self.pages.read(table, cut.start, cut.stop))
        elif self.rotation.refusal in (None, UNCHECKED) and any(one.is_placeholder for one in request.segments):
            read: ReadKV = partial(self.pages.read, table)
            plan = self.writes.take_written(request.request_id)
            if plan is None and not self.rotation.is_checked:
                self.rotation.check(request.tokens, read(0, request.prompt_tokens))
            first = request.segments[0]
            if first.tokens and not first.is_placeholder and self._head(request) is None:
                self._bases.put_content(request.namespace, first.tokens, (), read(0, len(first.tokens)))
            self._runtime.keep_base(request, read, plan)
            if request.request_id in self._harvests and self._runtime.may_observe(request, plan):
                self._captured.append(_CapturedPrompt(request, read(0, request.prompt_tokens), plan))
            self._harvests.pop(request.request_id, None)

    # learning -----------------------------------------------------------------------------------------------------

    @property
    def is_learning(self) -> bool:
        """Whether a prompt can be prepared, or learned from as its base KV is there."""
        if self.is_at_rest:
            return False
        return self._expected.is_due or any(self._is_ready(prompt) for prompt in self._captured)

    def _is_ready(self, prompt: _CapturedPrompt) -> bool:
        return prompt.steps is not None or not self._runtime.needs(prompt.request)

    def learn(self) -> bool:
        """Prepare one value of an expected prompt, or else measure the offsets of one segment of a captured prompt. No
        offsets are measured while a write is planned.

        Returns False if there is nothing of this to be done now.
        """
        if self.is_at_rest:
            return False
        try:
            if self._expected.prepare():
                return True
        except Exception:
            logger.exception("a prompt was not prepared")
            return True
        prompt = next((one for one in self._captured if self._is_ready(one)), None)
        if prompt is None or self.writes:
            self.is_at_rest = prompt is None
            return False
        prompt.steps = prompt.steps or self._runtime.observe(prompt.request, prompt.kv.slice, prompt.plan)
        if not self._observe(prompt):
            self._captured.remove(prompt)
            self._forget_ended_runs()
        return True

    def _observe(self, prompt: _CapturedPrompt) -> bool:
        """Return False where no segment is left, or where offsets cannot be kept (which changes no pool)."""
        assert prompt.steps is not None
        try:
            return next(prompt.steps, None) is not None
        except TranslationRefused as refusal:
            logger.warning("request %s is not learned from: %s", prompt.request.request_id, refusal)
            return False

    def expect(self, request: GenerateRequest) -> None:
        """Take the prompt of an agent that runs next, as far as it is known."""
        self.is_at_rest = False
        self._expected.expect(request)

    def end_run(self, run: RunKey) -> None:
        """Forget what the agents of a run shared, once nothing is left to learn from it."""
        self._expected.end_run(run)
        self._ended_runs.append(run)
        self._forget_ended_runs()

    def _forget_ended_runs(self) -> None:
        pending = {prompt.request.run_key for prompt in self._captured}
        for one in [one for one in self._ended_runs if one not in pending]:
            self._runtime.end_run(one)
            self._ended_runs.remove(one)

    def clear(self) -> None:
        """Forget all anchors and all base KV."""
        self._expected.clear()
        self._runtime.clear()
        self._captured.clear()


def limited(anchors: AnchorStore, quotas: Mapping[str, QuotaSettings]) -> AnchorStore:
    """Return a store that keeps tenants to their quotas."""
    for tenant, quota in quotas.items():
        if tenant == OTHERS:
            anchors.limit_others(quota.anchor_bytes)
        else:
            anchors.limit(TenantId(tenant), quota.anchor_bytes)
    return anchors
