"""The scheduler's half of translation: what the workers are asked, what they translate, and what they capture.

Anchors are with the workers, so they are asked about a request in one step and it is admitted in a later one; where the
only worker is in the scheduler's process, in the same. Its blocks from the first translated token on never get a hash:
lookups miss them, and they are never copied to the host.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from vllm.reasoning import ReasoningParser
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from kedge.guard import EVERYTHING, GuardMode
from kedge.integrations.vllm.plugin.lanes import BasePrefills, HeldBlocks, LaneGrants
from kedge.integrations.vllm.plugin.requests import (
    Capture,
    LiveRequest,
    Orders,
    Reports,
    TranslationQuery,
    TranslationVerdict,
    TranslationWrite,
)
from kedge.reuse.plan import NOT_WORTH_IT
from kedge.settings import GuardSettings
from kedge.types import ClientId, GenerateRequest, RequestId, ReuseMode, RunId, RunKey, Tokens

UNPROVED_HERE = "nothing proves it within a budget of fidelity: KedgeMiddleware does, and fidelity any needs no proof"
EMPTIED = "the caches were emptied while it waited or ran"
NO_LANES = "vLLM's scheduler is not Kedge's, or another KV connector would save translated KV as if it were exact"


class Translations:
    """All requests with hints that are translated or learned from. Owned by the scheduler."""

    def __init__(self, refusal: str | None, ranks: int, guard: GuardSettings, *, is_ahead: bool = False) -> None:
        """`refusal`: the reason why nothing can be translated with this model, if there is one. `guard`: what holds for
        requests without orders of a guard. `is_ahead`: a step is started before the tokens of the one before are read.
        """
        self._guard = guard
        self._model_refusal = refusal
        self.requests: dict[str, LiveRequest] = {}
        """All that wait or run, by vLLM's ids; whoever follows them enters and removes them"""
        self.able = set[str]()
        """Requests that may start in this step: others are not asked about, or a queue would be judged in one step"""
        self._orders = Orders()
        """Of the step that is being scheduled"""
        self.held = HeldBlocks(ranks)
        """For captures"""
        self.reasoner: ReasoningParser | None = None
        """Tells an answer from its reasoning, where vLLM was started with such a parser"""
        self.lanes = LaneGrants(self.requests, BasePrefills(self.held, self._order))
        self._is_learning = False
        self._prefilled: dict[RequestId, LiveRequest] = {}
        """Admitted requests whose prompts are captured once they are computed"""
        self._completed: deque[list[Capture]] = deque([] for _ in range(2 if is_ahead else 1))
        """Prompts to be captured in the steps to come, once their first tokens have been read; their blocks are held"""

    def _order(self, capture: Capture) -> None:
        self._orders.captures += (capture,)

    def guard(self, coordinator: Any, block_ids: Callable[[str], Sequence[Sequence[int]]]) -> None:
        """Let vLLM's `coordinator.cache_blocks`, which hashes full blocks and is called for every request in every
        step, leave out translated ones while there are any. `block_ids` returns the blocks of a request in each group.
        """
        self._block_ids, self._coordinator, cache_blocks = block_ids, coordinator, coordinator.cache_blocks

        def guarded(request: Request, num_computed_tokens: int) -> None:
            live = self.requests.get(request.request_id)
            exact = live.written[0].start if live and live.written else num_computed_tokens
            cache_blocks(request, min(num_computed_tokens, exact))

        self._guarded = guarded

    @property
    def refusal(self) -> str | None:
        """The reason why nothing is translated, or None."""
        return self._model_refusal or (None if self.lanes.is_open else NO_LANES)

    # requests -------------------------------------------------------------------------------------------------

    def on_arrival(self, live: LiveRequest) -> None:
        """Take a new request with hints."""
        live.refusal = self.refusal or request_refusal(live.request) or self._unproved(live.asked)

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
        return UNPROVED_HERE if request.wants_translation else None

    def match(self, live: LiveRequest, computed: int) -> int | None:
        """Return how many tokens after the first `computed` need no computing by the request itself; None: it has to
        wait, for the workers' verdict or for lanes.
        """
        live.plan((), computed)
        if not live.is_asked_about:
            return 0
        if live.awaits and self._awaits_base(live):
            return None
        if live.verdict and live.preemptions != live.request.num_preemptions:  # its plan was used up
            live.withdraw()
            self._orders.dropped += (live.request_id,)
        if live.verdict is None:
            if not live.is_pending and live.request_id in self.able:
                live.is_pending = True
                self._orders.queries += (self.query(live, computed),)
            return None
        if computed < live.exact:
            live.lose(computed)
            return None  # more lanes may be needed, which are granted with the next step
        holes = self.lanes.holes_of(live)
        spared = None if holes is None else live.plan(holes, computed)
        if live.written:
            self._coordinator.cache_blocks = self._guarded
        return spared

    def may_ask_at_once(self, live: LiveRequest) -> bool:
        """Return whether the only worker, which is in this process, can answer before a step: not where it is still to
        forget, or to capture what the request may read, of its run or for base KV.
        """
        if not live.is_asked_about or live.verdict or live.is_pending or live.awaits or self._orders.forgets:
            return False
        runs = live.asked.run_key, RunKey(live.asked.namespace, ClientId(""), RunId(""))
        captures = itertools.chain(self._orders.captures, *self._completed)
        return not any(one.request.run_key in runs for one in captures)

    def query(self, live: LiveRequest, computed: int, *, delays: bool = True) -> TranslationQuery:
        """Return what to ask about a request of which the first `computed` tokens need no computing."""
        live.exact, live.preemptions = computed, live.request.num_preemptions
        may_wait = live.awaits is None and len(self.requests) > 1
        exact = min(computed, live.asked.prompt_tokens - 1)  # of one that was preempted, all may be cached
        return TranslationQuery(live.asked, exact, may_wait, live.awaits == (), delays)

    def _awaits_base(self, live: LiveRequest) -> bool:
        """Return whether a request waits for base KV, which goes before all that waits and is given up for want of
        room. Once it is there, or given up, the verdict is withdrawn.
        """
        namespace = live.asked.namespace
        if any(self.lanes.prefills.is_awaited(namespace, tokens) for tokens in live.awaits or ()):
            return True
        live.withdraw()
        live.awaits = ()
        return False

    def on_admission(self, live: LiveRequest, blocks: tuple[int, ...]) -> None:
        """Order the translation of an admitted request before this step's pass."""
        live.translated = live.written
        self.lanes.admit(live)
        if live.verdict and not live.captured and live.verdict.misses != (NOT_WORTH_IT,):  # worth something to others
            self._prefilled[live.request_id] = live
        if live.written:
            self._orders.writes += (TranslationWrite(live.request_id, blocks, live.written),)
        elif live.verdict:
            self._orders.dropped += (live.request_id,)

    def on_finish(self, live: LiveRequest, block_ids: list[int]) -> None:
        """Order the capture of an answer that others read, without its reasoning, as far as it was run. Its blocks are
        held until then.
        """
        if live.is_pending or live.verdict:
            self._orders.dropped += (live.request_id,)
        self._prefilled.pop(live.request_id, None)
        if live.written and not any(one.written for one in self.requests.values()):
            del self._coordinator.cache_blocks
        may_learn = live.asked.reuse is ReuseMode.TRANSLATE and live.refusal is None
        if live.asked.produces is not None and may_learn and block_ids:
            answer = answer_of(live.request)
            content = self._content_of(answer)
            reasoning = len(answer) - len(content)
            known = min(live.request.num_computed_tokens - live.request.num_prompt_tokens - reasoning, len(content))
            if known > 0:
                self._order(Capture(live.asked, tuple(block_ids), self.held.hold(block_ids), content, known, reasoning))

    def _content_of(self, answer: Tokens) -> Tokens:
        """Return what an answer says once its reasoning is over, which others do not read; all of it where vLLM's
        parser cannot tell.
        """
        content: Tokens = ()
        if self.reasoner:
            with suppress(NotImplementedError):  # as that of gpt-oss
                content = tuple(self.reasoner.extract_content_ids(list(answer)))
        return content if content and answer[-len(content) :] == content else answer

    def forget(self) -> None:
        """Let the workers forget all that they have learned. No request that is there now uses it or adds to it."""
        self.give_up_captures()
        self._orders = Orders(ended_runs=self._orders.ended_runs, forgets=True)
        self._prefilled.clear()
        for live in self.requests.values():
            live.refusal = live.refusal or EMPTIED
            live.withdraw()

    def end_run(self, run: RunKey) -> None:
        """Let the workers forget what the agents of a run shared."""
        self._orders.ended_runs += (run,)

    # once per step --------------------------------------------------------------------------------------------

    def take_orders(self, output: SchedulerOutput) -> Orders:
        """Return the orders for this step, with captures of prompts that earlier ones completed."""
        self._orders.captures += tuple(self._completed.popleft())
        self._completed.append([])
        for request_id, live in [*self._prefilled.items()]:
            scheduled = output.num_scheduled_tokens.get(request_id, 0)
            if scheduled and live.request.num_computed_tokens + scheduled >= live.request.num_prompt_tokens:
                del self._prefilled[request_id]
                live.captured = True
                blocks = self._block_ids(request_id)[0]
                held, is_translated = self.held.hold(blocks), bool(live.translated)
                self._completed[-1].append(Capture(live.asked, tuple(blocks), held, is_translated=is_translated))
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
            if (live := self.requests.get(request_id)) and live.hinted:
                self.take(live, verdict)
        for capture_id, ranks in reports.captured.items():
            self.held.on_captured(capture_id, ranks)

    def take(self, live: LiveRequest, verdict: TranslationVerdict) -> None:
        """Take the verdict on a request, and queue the base prefills that it asks for."""
        request = live.asked
        live.take_verdict(verdict)
        for tokens in verdict.needs:
            self.lanes.prefills.add(request.namespace, tokens)
        live.awaits = verdict.awaits if live.awaits is None else ()  # it waits once at most
        for tokens in live.awaits:
            self.lanes.prefills.add(request.namespace, tokens, is_awaited=True)

    def give_up_captures(self) -> None:
        """Free the blocks of finished requests, and drop the orders to read them that have not been sent."""
        self._orders.captures = ()
        for captures in self._completed:
            captures.clear()
        self.lanes.prefills.give_up()
        self.held.give_up()

    @property
    def busy(self) -> bool:
        """Whether a capture, a base prefill or an expected prompt is pending, or workers are learning."""
        return bool(self.held or self.lanes.prefills or self._orders.expected) or self._is_learning


def answer_of(request: Request) -> Tokens:
    """Return the answer of a request that has ended, without the token that stopped it."""
    tokens = tuple(request.output_token_ids)
    return tokens[:-1] if request.status is RequestStatus.FINISHED_STOPPED else tokens


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
