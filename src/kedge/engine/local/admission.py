"""Admission: finding KV and room for a sequence, and planning where the tokens of its prompt come from."""

from __future__ import annotations

import time
from collections.abc import Callable

from kedge.cache import CacheManager, Lease
from kedge.engine.local.components import Assembler
from kedge.engine.local.host_loads import Loading
from kedge.engine.local.learning import Learning
from kedge.engine.local.preassembly import PromptPreassembler
from kedge.engine.local.sentinels import Sentinels
from kedge.engine.local.sequence import BaseJob, RequestSequence, Sequence
from kedge.engine.local.shared_writes import SharedWrites
from kedge.engine.local.state_snapshots import StateSnapshots
from kedge.errors import GenerationFailed, KedgeError, OutOfBlocks
from kedge.kv.storage import SlotTable
from kedge.reuse.costs import EngineCosts
from kedge.reuse.plan import ReusePlan
from kedge.reuse.runtime import Runtime


class Admission:
    """The admission of sequences, which leases blocks to them. A request takes blocks from speculatively prepared
    prompts, learning and base prefills; these take free blocks only. If there is no other way, the first request of a
    tenant takes the blocks of another tenant's youngest one, which is computed again later.
    """

    def __init__(
        self,
        cache: CacheManager,
        runtime: Runtime,
        loading: Loading,
        assembler: Assembler,
        preassembly: PromptPreassembler,
        learning: Learning,
        costs: EngineCosts,
        sentinels: Sentinels,
        shared: SharedWrites,
        snapshots: StateSnapshots,
        preempt: Callable[[RequestSequence], bool],
        end: Callable[[RequestSequence, BaseException], None],
    ) -> None:
        """Build the admission. `preempt` takes a running request's blocks for another one, if permitted; `end` ends a
        request that cannot be planned, with the error.
        """
        self._cache, self._runtime, self._loading, self._assembler = cache, runtime, loading, assembler
        self._preassembly, self._learning, self._costs = preassembly, learning, costs
        self._sentinels, self._shared, self._snapshots = sentinels, shared, snapshots
        self._preempt, self._end = preempt, end

    def admit(self, sequence: Sequence) -> bool:
        """Find KV and room for a sequence. Returns False if it has to wait for blocks, or has ended with an error."""
        if isinstance(sequence, RequestSequence):
            return self._admit_request(sequence)
        lease = self._try_lease(sequence, len(sequence.tokens))
        while lease is None and isinstance(sequence, BaseJob) and sequence.is_awaited and self._reclaim_spare():
            lease = self._try_lease(sequence, len(sequence.tokens))
        if lease is None:
            return False
        sequence.table = SlotTable.of(lease.blocks, self._cache.block_size)
        sequence.todo = list(range(lease.exact_tokens, len(sequence.tokens)))
        return True

    # what `Scheduler` asks of requests that may have to step aside -----------------------------------------------

    @property
    def lets_pass(self) -> bool:
        """Whether others go before a request that waits for its KV."""
        return self._loading.lets_pass

    def is_ready(self, sequence: RequestSequence, *, busy: bool) -> bool:
        """Return whether to admit a request now: its KV is loaded and, where others run too, base KV of its values is
        there. Alone, its exact prefill delays no other request, and base KV is computed in idle time.
        """
        return self._loading.is_ready(sequence) and not self._learning.awaits_base(sequence, busy=busy)

    def skipped(self, sequence: RequestSequence) -> None:
        """Count that another request was admitted before one that stepped aside."""
        if sequence.load_asked is not None:
            self._loading.skipped(sequence)

    # leases -------------------------------------------------------------------------------------------------------

    def _admit_request(self, sequence: RequestSequence) -> bool:
        try:
            return self._begin(sequence)
        except KedgeError as error:
            self._end(sequence, error)
        except Exception as error:  # out of memory, say: planning is this request's alone
            self._end(sequence, GenerationFailed.of(sequence.request.request_id, "its prompt was planned", error))
        return False

    def _begin(self, sequence: RequestSequence) -> bool:
        if sequence.plan is not None:
            return self._resume(sequence)
        began = time.monotonic()
        adopted = self._preassembly.adopt(sequence, sequence.room)
        lease = adopted or self._lease(sequence)
        if lease is None:
            return False
        sequence.table = SlotTable.of(lease.blocks, self._cache.block_size)
        waited = self._loading.ended(sequence, began)
        planned = time.monotonic()
        matched = self._complete(sequence) if adopted else self._plan(sequence, lease)
        assembled = time.monotonic()
        self._note_times(sequence, began, waited, planned, matched, assembled)
        return True

    def _resume(self, sequence: RequestSequence) -> bool:
        """Compute a preempted request's tokens again, as far as they are not cached."""
        lease = self._lease(sequence)
        if lease is not None:
            sequence.table = SlotTable.of(lease.blocks, self._cache.block_size)
            sequence.todo = list(range(lease.exact_tokens, len(sequence.tokens)))
        return lease is not None

    def _note_times(
        self, sequence: RequestSequence, began: float, waited: float, planned: float, matched: float, assembled: float
    ) -> None:
        sequence.parts = {
            "queue": began - sequence.arrival - waited,
            "match": matched - planned,
            "assemble": assembled - matched,
            "other": planned - began,
        }
        if sequence.load_asked is not None:
            sequence.parts["load"] = waited

    def _plan(self, sequence: RequestSequence, lease: Lease) -> float:
        """Plan and write the translated spans. Returns the time at which planning ended."""
        began, taken = time.monotonic(), self._shared.tokens
        plan = self._runtime.plan(sequence.request, lease.spans)
        matched = time.monotonic()
        sequence.plan = self._write(sequence, plan)
        sequence.todo = sequence.plan.computed
        if sequence.plan.sentinels:
            assert sequence.table is not None
            sequence.sentinels = [self._sentinels.read(sequence.table, sequence.plan.sentinels)]
        if plan.translations and self._shared.tokens == taken:  # else it would seem cheaper than it is
            self._costs.observe_translation(len(plan.translations), plan.translated_tokens, time.monotonic() - began)
        return matched

    def _write(self, sequence: RequestSequence, plan: ReusePlan) -> ReusePlan:
        """Write the translations of a plan. Returns the plan as carried out."""
        assert sequence.table is not None
        if not self._assembler.works_ahead:  # it writes something else than translations
            return self._assembler.assemble(sequence.request, sequence.table, plan)
        left = self._shared.take(sequence, plan)
        self._assembler.assemble(sequence.request, sequence.table, left)
        sequence.written = plan.translations
        return plan

    def _complete(self, sequence: RequestSequence) -> float:
        """Complete an adopted prompt. Returns the time at which this began."""
        began = time.monotonic()
        sequence.plan, sequence.todo = self._preassembly.complete(sequence)
        return began

    def _lease(self, sequence: RequestSequence) -> Lease | None:
        """Lease blocks to a request, evicting speculatively prepared prompts first, then prompts kept for learning,
        then base prefills, then another tenant's requests. Returns None if there is no room now.
        """
        while (lease := self._try_lease(sequence, sequence.room)) is None:
            if not (self._reclaim() or self._preempt(sequence)):
                return None
        return lease

    def _reclaim(self) -> bool:
        return self._reclaim_spare() or self._learning.reclaim_job()

    def _reclaim_spare(self) -> bool:
        """Free blocks of work that no request waits for. Returns False if there is none."""
        return self._preassembly.give_back() or self._learning.reclaim()

    def _try_lease(self, sequence: Sequence, room: int) -> Lease | None:
        limit = self._snapshots.limit(sequence)
        try:
            lease = self._cache.admit(sequence.key, sequence.namespace, sequence.tokens, limit, room)
        except OutOfBlocks:
            return None
        self._snapshots.begin(sequence, lease.exact_tokens)
        return lease
