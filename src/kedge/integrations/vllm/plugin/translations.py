"""The scheduler's half of translation: which prompts are asked about, what vLLM is told is there, what is captured.

The anchors are with the workers, so a request is asked about in one step and admitted in a later one. Its translated
blocks never get a hash: nobody finds them, and they are never copied to the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kedge.integrations.vllm.plugin.hints import Call
from kedge.integrations.vllm.plugin.messages import Ask, Capture, Orders, Reports, Verdict, Write
from kedge.types import Miss, Namespace, RequestId, ReuseMode, Tokens
from kedge.workflow.forecast import RunKey

CacheBlocks = Callable[[Request, int], None]
Need = tuple[Namespace, Tokens]
"""A base prefill: for whom, and of what"""
MOST_ASKS = 3
"""Times that a request is asked about, as its exact prefix was evicted meanwhile; then it is prefilled densely."""


@dataclass(frozen=True, slots=True)
class Notes:
    """What a receipt says of translation."""

    misses: tuple[Miss, ...] = ()
    needs: tuple[Tokens, ...] = ()


@dataclass(eq=False, slots=True)
class _Case:
    """A request that may be translated, or that is learned from."""

    call: Call
    request: Request
    refusal: str | None
    exact: int = 0
    """Leading tokens that were exact when it was asked about"""
    asked: int = 0
    waits: bool = False
    """A verdict is on its way"""
    verdict: Verdict | None = None
    preemptions: int = 0
    translated: bool = False
    """Some of its blocks hold translated KV, or will"""
    captured: bool = False

    @property
    def learns(self) -> bool:
        return self.call.request.reuse is ReuseMode.TRANSLATE and self.refusal is None

    @property
    def has_placeholders(self) -> bool:
        return any(segment.is_placeholder for segment in self.call.request.segments)


@dataclass(slots=True)
class _Outbox:
    asks: list[Ask] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    captures: list[Capture] = field(default_factory=list)
    dropped: list[RequestId] = field(default_factory=list)
    ended_runs: list[RunKey] = field(default_factory=list)

    def sealed(self) -> Orders:
        return Orders(
            asks=tuple(self.asks),
            writes=tuple(self.writes),
            captures=tuple(self.captures),
            dropped=tuple(self.dropped),
            ended_runs=tuple(self.ended_runs),
        )


class Translations:
    """One case for each request with hints. `refusal` says why nothing can be translated at all."""

    def __init__(self, refusal: str | None, ranks: int) -> None:
        self._refusal, self._ranks = refusal, ranks
        self._cases: dict[str, _Case] = {}
        self._outbox = _Outbox()
        self._pool: BlockPool | None = None
        self._capture_ids = itertools.count()
        self._held: dict[int, tuple[int, list[KVCacheBlock]]] = {}
        self._learning = False
        self._needed: list[Need] = []

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool

    def guarded(self, cache_blocks: CacheBlocks) -> CacheBlocks:
        """vLLM's `coordinator.cache_blocks`, which gives hashes to full blocks, but for translated requests."""

        def guard(request: Request, num_computed_tokens: int) -> None:
            case = self._cases.get(request.request_id)
            if case is None or not case.translated:
                cache_blocks(request, num_computed_tokens)

        return guard

    # requests -------------------------------------------------------------------------------------------------

    def arrived(self, call: Call, request: Request) -> None:
        self._cases[request.request_id] = _Case(call, request, self._refusal or why_not(request))

    def matched(self, request: Request, computed: int) -> int | None:
        """Tokens after the first `computed` that the workers can translate; None while they are asked."""
        case = self._cases[request.request_id]
        case.translated = False
        if not case.learns or not case.has_placeholders:
            return 0
        if case.verdict and (case.preemptions != request.num_preemptions or computed < case.exact):
            self._drop(case)
        if case.verdict is None:
            return self._ask(case, computed)
        there = max(0, min(case.verdict.tokens, request.num_prompt_tokens - 1) - computed)
        case.translated = there > 0
        return there

    def _ask(self, case: _Case, computed: int) -> int | None:
        if case.waits:
            return None
        if case.asked == MOST_ASKS + case.request.num_preemptions:
            return 0
        case.asked += 1
        case.exact, case.preemptions, case.waits = computed, case.request.num_preemptions, True
        self._outbox.asks.append(Ask(case.call.request, computed))
        return None

    def _drop(self, case: _Case) -> None:
        """The verdict is of no use any more."""
        case.verdict = None
        self._outbox.dropped.append(case.call.request.request_id)

    def allocated(self, request: Request, blocks: tuple[int, ...], external: int) -> None:
        """The request is admitted; the last `external` of what is there are to be written before this step's pass."""
        case = self._cases[request.request_id]
        if external:
            assert case.verdict is not None
            stop = min(case.verdict.tokens, request.num_prompt_tokens - 1)
            write = Write(case.call.request.request_id, blocks, stop - external, stop)
            self._outbox.writes.append(write)
        elif case.verdict:
            self._outbox.dropped.append(case.call.request.request_id)

    def finished(self, call: Call, request: Request, block_ids: list[int]) -> None:
        """A response that others read is captured; its blocks are held until it has been."""
        case = self._cases[request.request_id]
        if case.waits or case.verdict:
            self._outbox.dropped.append(call.request.request_id)
        count = request.num_computed_tokens - request.num_prompt_tokens
        response = tuple(request.output_token_ids[:count]) if count > 0 else ()
        if call.request.produces is None or not response or not case.learns or self._pool is None:
            return
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        self._pool.touch(blocks)
        capture_id = next(self._capture_ids)
        self._held[capture_id] = (0, blocks)
        capture = Capture(call.request, tuple(block_ids), response, not case.translated, capture_id)
        self._outbox.captures.append(capture)

    def notes(self, request_id: str) -> Notes:
        """What is to be said of a request that has finished; forgets it."""
        case = self._cases.pop(request_id)
        if case.call.request.reuse is not ReuseMode.TRANSLATE or not case.has_placeholders:
            return Notes()
        if case.refusal:
            return Notes((Miss("*", case.refusal),))
        return Notes(case.verdict.misses, case.verdict.needs) if case.verdict else Notes()

    def end_run(self, run: RunKey) -> None:
        self._outbox.ended_runs.append(run)

    # once per step ----------------------------------------------------------------------------------------------

    def orders(self, output: SchedulerOutput) -> Orders:
        for request_id, scheduled in output.num_scheduled_tokens.items():
            case = self._cases.get(request_id)
            if case is None or case.captured:
                continue
            if case.request.num_computed_tokens + scheduled >= case.request.num_prompt_tokens:
                case.captured = True
                self._capture_prompt(case, output)
        orders, self._outbox = self._outbox.sealed(), _Outbox()
        return orders

    def _capture_prompt(self, case: _Case, output: SchedulerOutput) -> None:
        """The prompt is complete with this step: what it teaches is read after the pass."""
        wanted = case.call.is_base or (case.learns and case.has_placeholders and not case.translated)
        state = output.kv_connector_block_state
        if not wanted or self._refusal or state is None:
            return
        block_ids = state.get_block_ids(case.request.request_id)
        assert block_ids is not None
        self._outbox.captures.append(Capture(case.call.request, tuple(block_ids[0])))

    def reported(self, reports: Reports) -> None:
        self._learning = reports.learning
        for request_id, verdict in reports.verdicts.items():
            if case := self._cases.get(request_id):
                case.verdict, case.waits = verdict, False
                self._needed += [(case.call.request.namespace, tokens) for tokens in verdict.needs]
        for capture_id, ranks in reports.captured.items():
            self._count(capture_id, ranks)

    def take_needed(self) -> list[Need]:
        """The base prefills that verdicts since the last call asked for."""
        needed, self._needed = self._needed, []
        return needed

    def _count(self, capture_id: int, ranks: int) -> None:
        done, blocks = self._held[capture_id]
        self._held[capture_id] = (done + ranks, blocks)
        if done + ranks == self._ranks:
            del self._held[capture_id]
            assert self._pool is not None
            self._pool.free_blocks(reversed(blocks))

    @property
    def busy(self) -> bool:
        """Whether something is to be captured or learned."""
        return bool(self._held) or self._learning


def why_not(request: Request) -> str | None:
    """Why this request is prefilled densely, whatever the model."""
    if request.lora_request is not None:
        return "a LoRA adapter has KV of its own"
    if request.mm_features:
        return "multimodal spans have no token ids to match"
    if request.prompt_embeds is not None:
        return "a prompt of embeddings has no token ids to match"
    if request.sampling_params is not None and request.sampling_params.prompt_logprobs is not None:
        return "prompt_logprobs needs every prompt token computed"
    if request.skip_reading_prefix_cache:
        return "the request does not read the prefix cache"
    return None
