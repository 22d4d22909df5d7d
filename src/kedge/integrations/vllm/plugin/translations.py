"""The scheduler's half of translation: what the workers are asked, what they translate, and what they capture.

Anchors are with the workers, so they are asked about a request in one step and it is admitted in a later one; in an
idle engine whose only worker is in the scheduler's process, in the same. Its blocks from the first translated token on
never get a hash: lookups miss them, and they are never copied to the host.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kedge.guard import EVERYTHING, GuardMode
from kedge.integrations.vllm.plugin.hints import HintedRequest
from kedge.integrations.vllm.plugin.lanes import (
    AnswerTails,
    BaseJobs,
    CacheBlocks,
    EndedAnswer,
    HeldBlocks,
    LaneGrants,
    TranslationCandidate,
)
from kedge.integrations.vllm.plugin.messages import (
    Capture,
    Orders,
    Reports,
    TranslationQuery,
    TranslationVerdict,
    TranslationWrite,
)
from kedge.reuse.holes import Holes
from kedge.reuse.planner import CHEAPER
from kedge.settings import GuardSettings
from kedge.structures.bounded import BoundedDict
from kedge.types import (
    GenerateRequest,
    Miss,
    ReuseMode,
    RunKey,
)

LONGER = 1.25
"""How many times as long as one that did not pay a prompt is that may pay"""
UNPROVED_HERE = "nothing proves it within a budget of fidelity: KedgeMiddleware does, and fidelity any needs no proof"
LOSING = "translating this workflow saves too little time for what it takes"
TRIED, MAX_TRIED = 16, 256
"""Runs, or requests, until one is translated although that did not pay. After each that has not shown that it does,
twice as many are left alone, up to the second number: trying must not cost what standing aside saves.
"""
MAX_ASIDE = 4096
"""Workflows and agents that stand aside, and their runs; what was used longest ago is forgotten."""
BlockIds = Callable[[str], Sequence[Sequence[int]]]
"""Returns the block ids of a request, by its id, in each KV cache group"""
Answer = Callable[[TranslationQuery], TranslationVerdict]
NO_LANES = "vLLM's scheduler is not Kedge's, or another KV connector would save translated KV as if it were exact"
MAX_QUERIES = 3
"""Queries for one request, whose exact prefix may be evicted after each; then it is prefilled densely."""
MAX_WAITS = 64
"""Steps for which a request waits for base KV; then it goes on without"""


@dataclass(slots=True)
class _Tries:
    """When what is left alone is tried, so that it is seen when that pays again."""

    tokens: int
    """Of the longest prompt that was found not to pay"""
    every: int = TRIED
    left: int = TRIED
    """Runs, or requests, until the next try"""

    def take(self) -> bool:
        """Return whether the run, or the request, that begins is tried."""
        self.left -= 1
        if self.left:
            return False
        self.every = self.left = min(2 * self.every, MAX_TRIED)
        return True


class StandAside:
    """Workflows and agents of one scheduler for which the workers report that translation does not pay. Runs of such a
    workflow are left alone as a whole: an agent's prompt can be translated only where the answers before it were kept.
    """

    def __init__(self) -> None:
        self._aside: BoundedDict[Hashable, _Tries] = BoundedDict(MAX_ASIDE)
        self._is_tried: BoundedDict[RunKey, bool] = BoundedDict(MAX_ASIDE)

    def report(self, request: GenerateRequest, verdict: TranslationVerdict) -> None:
        """Take what the workers say about the workflow and the agent of a request."""
        agent = request.workflow_agent
        for key, is_aside in ((agent[:2], verdict.is_losing), (agent, verdict.is_declined)):
            if not is_aside:
                self._aside.pop(key, None)
                continue
            found = self._aside.use(key, lambda: _Tries(request.prompt_tokens))
            found.tokens = max(found.tokens, request.prompt_tokens)

    def leaves_alone(self, request: GenerateRequest) -> bool:
        """Return whether a request is left alone, since its run is."""
        tries = self._aside.get(request.workflow_agent[:2])
        if tries is None:
            return False
        return not (self._is_tried.use(request.run_key, tries.take) if request.run else tries.take())

    def declines(self, request: GenerateRequest) -> bool:
        """Return whether computing a request takes less time, as that of its agent's last one did. Workers are asked
        again about a prompt that is a good deal longer.
        """
        tries = self._aside.get(request.workflow_agent)
        return tries is not None and request.prompt_tokens <= LONGER * tries.tokens and not tries.take()


class Translations:
    """All requests with hints that are translated or learned from. Owned by the scheduler."""

    def __init__(self, refusal: str | None, ranks: int, guard: GuardSettings, *, is_ahead: bool = False) -> None:
        """`refusal`: the reason why nothing can be translated with this model, if there is one. `guard`: what holds for
        requests without orders of a guard. `is_ahead`: a step is started before the tokens of the one before are read.
        """
        self._guard = guard
        self._model_refusal = refusal
        self._block_ids: BlockIds | None = None
        self._candidates: dict[str, TranslationCandidate] = {}
        self._orders = Orders()
        """Of the step that is being scheduled"""
        self.held = HeldBlocks(ranks)
        """For captures; its pool, the device's, is set once vLLM has one"""
        tails, bases = AnswerTails(self.held, self._order), BaseJobs(self.held, self._order)
        self.lanes = LaneGrants(self._candidates, tails, bases)
        self._aside = StandAside()
        self._is_learning = False
        self._completed: deque[list[Capture]] = deque([] for _ in range(2 if is_ahead else 1))
        """Prompts to be captured in the steps to come, once their first tokens have been read; their blocks are held"""

    def _order(self, capture: Capture) -> None:
        self._orders.captures += (capture,)

    def guard(self, cache_blocks: CacheBlocks, block_ids: BlockIds) -> CacheBlocks:
        """Wrap vLLM's `coordinator.cache_blocks`, which hashes full blocks, so that translated ones are left out.

        `block_ids` returns the blocks of a request in each group. Nothing is translated before this call.
        """
        self._block_ids = block_ids

        def guarded(request: Request, num_computed_tokens: int) -> None:
            if candidate := self._candidates.get(request.request_id):
                candidate.cache_blocks(cache_blocks, num_computed_tokens)
            else:
                cache_blocks(request, num_computed_tokens)

        return guarded

    @property
    def refusal(self) -> str | None:
        """The reason why nothing is translated, or None."""
        is_ready = self._block_ids is not None and self.lanes.is_open
        return self._model_refusal or (None if is_ready else NO_LANES)

    # requests -------------------------------------------------------------------------------------------------

    def on_arrival(self, hinted: HintedRequest, request: Request) -> None:
        """Take a new request."""
        refusal = self.refusal or request_refusal(request) or self._unproved(hinted.request)
        is_served = hinted.request.reuse is ReuseMode.TRANSLATE and not hinted.request.guard.is_proving
        if is_served and self._aside.leaves_alone(hinted.request):
            refusal = refusal or LOSING
        candidate = self._candidates[request.request_id] = TranslationCandidate(hinted, request, refusal)
        candidate.is_declined = candidate.is_asked_about and self._aside.declines(hinted.request)

    def expect(self, request: GenerateRequest) -> None:
        """Take the prompt of an agent that runs next, which the workers may prepare."""
        if self.refusal is None and request.reuse is ReuseMode.TRANSLATE and not self._unproved(request):
            self._orders.expected += (request,)

    def _unproved(self, request: GenerateRequest) -> str | None:
        """Return the reason why a request must not be translated: no guard has ordered how, and it needs proof."""
        orders = request.guard
        mode, budget = orders.mode or self._guard.mode, orders.fidelity or self._guard.fidelity
        if orders.rung is not None or EVERYTHING in orders.withheld or mode is GuardMode.OFF or math.isinf(budget):
            return None
        return UNPROVED_HERE if any(one.is_placeholder for one in request.segments) else None

    def match(self, request: Request, computed: int) -> int | None:
        """Return how many tokens after the first `computed` need no computing by the request itself; None: it has to
        wait, for the workers' verdict or for lanes.
        """
        candidate = self._candidates[request.request_id]
        candidate.plan((), computed)
        if not candidate.is_asked_about:
            return 0
        if candidate.awaits and self._awaits_base(candidate):
            return None
        if candidate.verdict and candidate.is_outdated(computed):
            candidate.withdraw()
            self._orders.dropped += (candidate.request_id,)
        if candidate.verdict is None:  # the workers are asked, unless they have been too often
            if not candidate.is_pending:
                if (query := self._query(candidate, computed)) is None:
                    return 0
                candidate.is_pending = True
                self._orders.queries += (query,)
            return None
        holes = self.lanes.holes_of(candidate)
        return None if holes is None else candidate.plan(holes, computed)

    def ask_at_once(self, request: Request, computed: int, answer: Answer) -> None:
        """Ask the only worker, which is in this process, about a waiting request that nobody has asked about. What it
        knows is what it was ordered in earlier steps: where a capture is still to be ordered, it is asked by a step.
        """
        candidate = self._candidates.get(request.request_id)
        if candidate is None or not candidate.is_asked_about or candidate.verdict or candidate.is_pending:
            return
        is_behind = self._orders.captures or any(self._completed) or self.lanes.tails.is_wanted
        if is_behind or candidate.awaits or not (query := self._query(candidate, computed)):
            return
        self._take(candidate, answer(query))

    def _query(self, candidate: TranslationCandidate, computed: int) -> TranslationQuery | None:
        """Return what to ask about a request; None where that was asked too often."""
        request = candidate.request
        if candidate.queries == MAX_QUERIES + request.num_preemptions:
            return None
        candidate.queries += 1
        candidate.exact, candidate.preemptions = computed, request.num_preemptions
        may_wait = candidate.awaits is None and len(self._candidates) > 1
        return TranslationQuery(candidate.hinted.request, computed, may_wait, has_waited=candidate.awaits == ())

    def _awaits_base(self, candidate: TranslationCandidate) -> bool:
        """Return whether a request waits for base KV. Once that is there, or given up, its verdict is withdrawn."""
        namespace = candidate.hinted.request.namespace
        candidate.waits += 1
        is_awaited = any(self.lanes.bases.is_awaited(namespace, tokens) for tokens in candidate.awaits or ())
        if is_awaited and candidate.waits <= MAX_WAITS:
            return True
        candidate.withdraw()
        candidate.awaits, candidate.queries = (), 0
        return False

    def on_admission(self, request: Request, blocks: tuple[int, ...]) -> Holes:
        """Order the translation of an admitted request before this step's pass. Returns the positions to be written."""
        candidate = self._candidates[request.request_id]
        self.lanes.admit(candidate)
        if candidate.written:
            self._orders.writes += (TranslationWrite(candidate.request_id, blocks, candidate.written),)
        elif candidate.verdict:
            self._orders.dropped += (candidate.request_id,)
        return candidate.written

    def on_finish(self, hinted: HintedRequest, request: Request, block_ids: list[int]) -> None:
        """Order the capture of a response that other agents read; its blocks are held until then."""
        candidate = self._candidates[request.request_id]
        if candidate.is_pending or candidate.verdict:
            self._orders.dropped += (candidate.request_id,)
        if hinted.request.produces is None or not candidate.may_learn or self.held.pool is None:
            return
        answer = EndedAnswer.of(hinted.request, request, is_exact=not candidate.written)
        self.lanes.tails.add(answer, block_ids)

    def take_outcome(self, request_id: str) -> tuple[tuple[Miss, ...], int]:
        """Return why tokens of a finished request were not translated, and of how many leading tokens what is
        translated was so before it arrived. Forgets the request.
        """
        candidate = self._candidates.pop(request_id)
        if candidate.hinted.request.reuse is not ReuseMode.TRANSLATE or not candidate.has_placeholders:
            return (), 0
        if candidate.refusal:
            return (Miss("*", candidate.refusal),), 0
        if (verdict := candidate.verdict) is None:
            return (Miss("*", CHEAPER),) if candidate.is_declined else (), 0
        return verdict.misses, verdict.ready

    def end_run(self, run: RunKey) -> None:
        """Let the workers forget what the agents of a run shared."""
        self._orders.ended_runs += (run,)

    # once per step --------------------------------------------------------------------------------------------

    def take_orders(self, output: SchedulerOutput) -> Orders:
        """Return the orders for this step, with captures of prompts that earlier ones completed."""
        self._orders.captures += tuple(self._completed.popleft())
        self._completed.append([])
        for request_id, scheduled in output.num_scheduled_tokens.items() if self._candidates else ():
            candidate = self._candidates.get(request_id)
            if candidate is None or candidate.captured:
                continue
            if candidate.request.num_computed_tokens + scheduled >= candidate.request.num_prompt_tokens:
                candidate.captured = True
                if candidate.verdict and candidate.verdict.teaches and self._block_ids:
                    blocks = self._block_ids(candidate.request.request_id)[0]
                    capture = Capture(candidate.hinted.request, tuple(blocks), self.held.hold(blocks))
                    self._completed[-1].append(capture)
        orders, self._orders = self._orders, Orders()
        self._is_learning = self._is_learning or bool(orders.expected)
        tokens, rows = self.lanes.taken
        orders.scheduled = output.total_num_scheduled_tokens + tokens
        orders.rows = len(output.num_scheduled_tokens) + rows
        orders.prefills = bool(output.scheduled_new_reqs) or output.total_num_scheduled_tokens > len(
            output.num_scheduled_tokens
        )
        return orders

    def on_reports(self, reports: Reports) -> None:
        """Take the workers' verdicts, and free what they have captured."""
        self._is_learning = reports.learning
        for request_id, verdict in reports.verdicts.items():
            if candidate := self._candidates.get(request_id):
                self._take(candidate, verdict)
        for capture_id, ranks in reports.captured.items():
            self.held.on_captured(capture_id, ranks)

    def _take(self, candidate: TranslationCandidate, verdict: TranslationVerdict) -> None:
        """Take the verdict on a request, and queue the base prefills that it asks for."""
        request = candidate.hinted.request
        candidate.take_verdict(verdict)
        self._aside.report(request, verdict)
        for tokens in verdict.needs:
            self.lanes.bases.add(request.namespace, tokens)
        candidate.awaits = verdict.awaits if candidate.awaits is None else ()  # it waits once at most
        for tokens in candidate.awaits:
            self.lanes.bases.add_awaited(request.namespace, tokens)

    def give_up_captures(self) -> None:
        """Free the blocks of finished requests, and drop the orders to read them that have not been sent."""
        self._orders.captures = ()
        for captures in self._completed:
            captures.clear()
        self.lanes.tails.give_up()
        self.lanes.bases.give_up()
        self.held.give_up()

    @property
    def busy(self) -> bool:
        """Whether a capture, a base prefill or an expected prompt is pending, or workers are learning."""
        return bool(self.held or self.lanes.bases or self._orders.expected) or self._is_learning


def request_refusal(request: Request) -> str | None:
    """Return the reason why this request is prefilled densely with any model, or None."""
    if request.lora_request is not None:
        return "a LoRA adapter has KV of its own"
    if request.mm_features:
        return "multimodal spans have no token ids to match"
    if request.prompt_embeds is not None:
        return "a prompt of embeddings has no token ids to match"
    if request.sampling_params is not None and request.sampling_params.prompt_logprobs is not None:
        return "prompt_logprobs needs every prompt token computed"
    if request.pooling_params is not None:
        return "pooling reads the hidden state of every prompt token"
    if request.resumable:
        return "its prompt may grow while it runs"
    if request.skip_reading_prefix_cache:
        return "the request does not read the prefix cache"
    return None
