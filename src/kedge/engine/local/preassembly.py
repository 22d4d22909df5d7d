"""Prompts that are assembled before their requests arrive: what the forecast of KVFlow is worth to KVCOMM.

A preparation is the prompt of an agent that can run next, as far as it is known: its exact prefix locked, blocks of
its own, translated segments written, the tokens between them computed. It grows with every value that becomes known,
one placeholder at a time, and whenever a real request could run it stands back. The blocks of one that was used are its
request's then. Of one that was wasted or given back, exact ones stay cached.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

from kedge.anchors.translator import Translation
from kedge.cache import CacheManager, Lease, Readiness
from kedge.engine.local.sentinels import Sentinels
from kedge.engine.local.sequence import PreparedPrompt, RequestSequence
from kedge.errors import KedgeError, OutOfBlocks
from kedge.kv.storage import SlotTable
from kedge.reuse.ahead import Ended, ExpectedPrompts, filled
from kedge.reuse.costs import EngineCosts
from kedge.reuse.layout import layout
from kedge.reuse.plan import ReusePlan
from kedge.reuse.runtime import Runtime
from kedge.types import GenerateRequest, RequestId, ReuseMode, RunKey, SampleId, Tokens, new_request_id
from kedge.workflow.forecast import Changes

NEAR = 1.0
"""Steps-to-execution up to which prompts are assembled ahead; for them only KV that is needed later is evicted."""
logger = logging.getLogger(__name__)
Write = Callable[[GenerateRequest, SlotTable, Sequence[Translation]], None]
"""Writes translations into a request's slots"""


class PromptPreassembler(ExpectedPrompts[PreparedPrompt]):
    """All prepared prompts of an engine. Called by its owner thread only."""

    def __init__(
        self,
        cache: CacheManager,
        runtime: Runtime,
        write: Write,
        costs: EngineCosts,
        sentinels: Sentinels,
        longest: int,
        ahead: deque[PreparedPrompt],
    ) -> None:
        """Start without prepared prompts. Prompts of `longest` tokens or more are not served; `ahead` is the
        scheduler's queue of prepared prompts with tokens to compute.
        """
        super().__init__()
        self._cache, self._runtime, self._costs, self._sentinels = cache, runtime, costs, sentinels
        self._write = write
        self._longest, self._ahead = longest, ahead
        self._claimed: list[PreparedPrompt] = []
        self._ended: Counter[Ended] = Counter()
        self._begun = 0

    # hints ----------------------------------------------------------------------------------------------------

    def begin(self, request: GenerateRequest) -> PreparedPrompt:
        return PreparedPrompt(RequestId(f"ahead-{new_request_id()}"), request.namespace, [], request=request)

    def answered(self, run: RunKey, sample: SampleId, tokens: Tokens) -> None:
        """Fill in the value of a sample. An empty one leaves no segment, so that another prompt is going to come."""
        for preparation in self.of_run(run):
            if any(segment.sample == sample and not segment.tokens for segment in preparation.request.segments):
                known = filled(preparation.request, {sample: tokens})
                if tokens and known.prompt_tokens < self._longest:
                    preparation.learn(known)
                else:
                    self.drop(preparation, Ended.WASTED)

    def forecast(self, changes: Changes) -> None:
        """Forget the prompts of agents that the forecast does not expect soon any more."""
        for key, next_run in changes.items():
            if key in self.expected and (next_run is None or next_run.steps > NEAR):
                self.drop(self.expected[key], Ended.CANCELLED)

    def cancel(self, request_id: RequestId) -> bool:
        """Withdraw the hint of this id. Returns False if it is not, or no longer, known."""
        found = [one for one in self.expected.values() if one.request.request_id == request_id]
        for preparation in found:
            self.drop(preparation, Ended.CANCELLED)
        return bool(found)

    # requests -------------------------------------------------------------------------------------------------

    def claim(self, request: GenerateRequest) -> PreparedPrompt | None:
        """Return the prepared prompt that fits an arrived request, or None; it is assembled no further."""
        if preparation := super().claim(request):
            self._stop(preparation)
            self._claimed.append(preparation)
        return preparation

    def adopt(self, sequence: RequestSequence, preparation: PreparedPrompt) -> Lease | None:
        """Transfer the blocks of the prompt that a sequence has claimed to it, with room for its answer.

        Returns None if it was given back, if the cache has more of the prompt exactly, or for lack of room.
        """
        if preparation not in self._claimed:
            return None
        cached = self._cache.status(sequence.namespace, sequence.tokens[: sequence.exact_limit])
        if cached.device_tokens + cached.host_tokens > preparation.exact:
            self.drop(preparation, Ended.WASTED)
            return None
        while not self._extend(preparation, sequence.room):
            if not self.give_back(spare=preparation):
                return None
        self._claimed.remove(preparation)
        self._ended[Ended.USED] += 1
        return self._cache.hand_over(preparation.key, sequence.key)

    def complete(self, sequence: RequestSequence) -> tuple[ReusePlan, list[int]]:
        """Draft and write the rest of an adopted prompt. Returns the plan, and the positions still to compute.

        Raises as translating does.
        """
        preparation, request = sequence.preparation, sequence.request
        assert preparation is not None and sequence.table is not None
        ready = preparation.ready
        self._grow(preparation, sequence.table, len(request.segments))
        assert preparation.plan is not None
        self._runtime.use(preparation.plan)
        sequence.sentinels = preparation.sentinels
        todo = [*preparation.todo, request.prompt_tokens - 1]
        sequence.preassembled = min(ready, todo[0])
        return preparation.plan, todo

    def abandon(self, sequence: RequestSequence) -> None:
        """Drop the prompt that a sequence has claimed, if it ends before it was admitted."""
        if sequence.preparation in self._claimed:
            self.drop(sequence.preparation, Ended.CANCELLED)

    def give_back(self, spare: PreparedPrompt | None = None) -> bool:
        """Free the blocks of the prompt with the latest hint, a claimed one only after all others. Returns False if
        none but `spare` holds any.
        """
        holding = [one for one in (*self._claimed, *self.expected.values()) if one.admitted and one is not spare]
        if holding:
            self.drop(holding[-1], Ended.GIVEN_BACK)
        return bool(holding)

    # assembling -----------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether `assemble` has work."""
        return any(True for _ in self._assemblable())

    def assemble(self) -> bool:
        """Do one piece of work: blocks for one prompt, or one placeholder with the prefix segment after it.

        Returns False if nothing can be done now.
        """
        return any(self._advance(preparation) for preparation in list(self._assemblable()))

    def wake(self) -> None:
        """Let stalled prompts try again, after blocks have come free or a copy has ended."""
        for preparation in self.expected.values():
            preparation.stalled = False

    def _assemblable(self) -> Iterator[PreparedPrompt]:
        return (one for one in self.expected.values() if one.drafts_on and not one.stalled)

    def _advance(self, preparation: PreparedPrompt) -> bool:
        try:
            preparation.stalled = not (
                self._draft_on(preparation) if preparation.admitted else self._begin(preparation)
            )
        except KedgeError as error:
            logger.warning("agent %s is not prepared: %s", preparation.request.agent, error)
            self.drop(preparation, Ended.FAILED)
        except Exception:  # out of memory, say: the request itself is going to be planned when it comes
            logger.exception("agent %s could not be prepared", preparation.request.agent)
            self.drop(preparation, Ended.FAILED)
        return not preparation.stalled

    def _begin(self, preparation: PreparedPrompt) -> bool:
        """Lock the exact prefix and lease blocks. Returns False without room, or while a part is being loaded."""
        space, tokens, limit = preparation.namespace, preparation.tokens, preparation.exact_limit
        if self._cache.status(space, tokens[:limit]).readiness is Readiness.LOADING:
            return False
        try:
            lease = self._cache.admit(preparation.key, space, tokens, limit, len(tokens), NEAR)
        except OutOfBlocks:
            return False
        preparation.table = SlotTable.of(lease.blocks, self._cache.block_size)
        preparation.draft = self._runtime.planner.draft(preparation.request, lease.spans)
        self._begun += 1
        return True

    def _draft_on(self, preparation: PreparedPrompt) -> bool:
        """Draft to the end of the next placeholder's prefix segment. Returns False without room."""
        placed, segments = layout(preparation.request), preparation.next_stop
        if not self._extend(preparation, placed[segments - 1].stop, NEAR):
            return False
        assert preparation.table is not None
        self._grow(preparation, preparation.table, segments)
        if preparation.todo and preparation not in self._ahead:
            self._ahead.append(preparation)
        return True

    def _grow(self, preparation: PreparedPrompt, table: SlotTable, segments: int) -> None:
        """Draft and write the first `segments`, and seal the plan if these are all."""
        draft, request = preparation.draft, preparation.request
        assert draft is not None
        before, translated = len(draft.sources), preparation.translates
        if segments > draft.drafted:
            began, posted = time.monotonic(), len(draft.sentinels)
            translations = self._runtime.planner.grow(draft, request, segments)
            self._write(request, table, translations)
            if new := draft.sentinels[posted:]:
                preparation.sentinels.append(self._sentinels.read(table, new))
            if translations:
                tokens = sum(one.tokens for one in translations)
                self._costs.observe_translation(len(translations), tokens, time.monotonic() - began)
        if preparation.plan is None and segments == len(request.segments):
            preparation.plan = self._runtime.planner.seal(draft)
        if draft.dense:
            preparation.sentinels.clear()
        if translated and draft.dense:  # what was written and computed beside it must not be seen
            preparation.todo, before = [], draft.exact_tokens
        preparation.todo += draft.computed(before)
        if preparation.plan is not None:
            preparation.todo = [at for at in preparation.todo if at < request.prompt_tokens - 1]

    def _extend(self, preparation: PreparedPrompt, room: int, steps: float | None = None) -> bool:
        """Give a prompt blocks for `room` tokens; `steps` as for `CacheManager.admit`. Returns False without room."""
        try:
            lease = self._cache.extend(preparation.key, room, steps)
        except OutOfBlocks:
            return False
        preparation.table = SlotTable.of(lease.blocks, self._cache.block_size)
        return True

    # ends -----------------------------------------------------------------------------------------------------

    def shut(self) -> None:
        """Withdraw everything at the engine's end."""
        for preparation in (*self.expected.values(), *self._claimed):
            self.drop(preparation, Ended.CANCELLED)

    def drop(self, preparation: PreparedPrompt, ended: Ended) -> None:
        super().drop(preparation, ended)
        self._stop(preparation)
        if preparation in self._claimed:
            self._claimed.remove(preparation)
        if preparation.admitted:
            self._ended[ended] += 1
            # Exact tokens, computed for a request without translation, are cached.
            worthy = preparation.request.reuse is ReuseMode.EXACT and ended in (Ended.WASTED, Ended.GIVEN_BACK)
            self._cache.finish(preparation.key, preparation.tokens[: preparation.exact] if worthy else ())
            preparation.table = None
            self.wake()

    def _stop(self, preparation: PreparedPrompt) -> None:
        """Compute nothing more of a prompt."""
        if preparation in self._ahead:
            self._ahead.remove(preparation)

    def stats(self) -> dict[str, int]:
        """Return counts of prompts that held blocks, `live` and by how they ended."""
        live = sum(one.admitted for one in (*self.expected.values(), *self._claimed))
        return {"begun": self._begun, "live": live, **{one.value: self._ended[one] for one in Ended}}
