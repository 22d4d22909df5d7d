"""Admission: finding KV and room for a sequence, and planning where the tokens of its prompt come from."""

from __future__ import annotations

import time

from kedge.cache import Lease
from kedge.engine.local.build import EngineParts
from kedge.engine.local.requests import Requests
from kedge.engine.local.sequence import BaseJob, RequestSequence, Sequence
from kedge.errors import GenerationFailed, KedgeError, OutOfBlocks
from kedge.kv.storage import SlotTable


class Admission:
    """The admission of sequences, which leases blocks to them. A request takes blocks from speculatively prepared
    prompts, learning and base prefills; these take free blocks only. If there is no other way, the first request of a
    tenant takes the blocks of another tenant's youngest one, which is computed again later.
    """

    def __init__(self, parts: EngineParts, requests: Requests) -> None:
        """`requests` preempts a running request for another one, and ends one that cannot be planned."""
        self._parts, self._requests = parts, requests

    def admit(self, sequence: Sequence) -> bool:
        """Find KV and room for a sequence. Returns False if it has to wait for blocks, or has ended with an error."""
        if isinstance(sequence, RequestSequence):
            return self._admit_request(sequence)
        lease = self._try_lease(sequence, len(sequence.tokens))
        while lease is None and isinstance(sequence, BaseJob) and sequence.is_awaited and self._reclaim_spare():
            lease = self._try_lease(sequence, len(sequence.tokens))
        if lease is None:
            return False
        sequence.table = SlotTable.of(lease.blocks, self._parts.cache.block_size)
        sequence.todo = list(range(lease.exact_tokens, len(sequence.tokens)))
        return True

    # what `Scheduler` asks of requests that may have to step aside -----------------------------------------------

    @property
    def lets_pass(self) -> bool:
        """Whether others go before a request that waits for its KV."""
        return self._parts.loading.lets_pass

    def is_ready(self, sequence: RequestSequence, *, busy: bool) -> bool:
        """Return whether to admit a request now: its KV is loaded and, where others run too, base KV of its values is
        there. Alone, its exact prefill delays no other request, and base KV is computed in idle time.
        """
        return self._parts.loading.is_ready(sequence) and not self._parts.learning.awaits_base(sequence, busy=busy)

    def skipped(self, sequence: RequestSequence) -> None:
        """Count that another request was admitted before one that stepped aside."""
        if sequence.load_asked is not None:
            self._parts.loading.skipped(sequence)

    # leases -------------------------------------------------------------------------------------------------------

    def _admit_request(self, sequence: RequestSequence) -> bool:
        try:
            return self._begin(sequence)
        except KedgeError as error:
            self._requests.end(sequence, error)
        except Exception as error:  # out of memory, say: planning is this request's alone
            failure = GenerationFailed.of(sequence.request.request_id, "its prompt was planned", error)
            self._requests.end(sequence, failure)
        return False

    def _begin(self, sequence: RequestSequence) -> bool:
        """Lease blocks to a request, then plan its prompt and write what is translated. A preempted one is computed
        again, as far as its tokens are not cached.
        """
        parts, began = self._parts, time.monotonic()
        is_resumed = sequence.plan is not None
        adopted = None if is_resumed else parts.preassembly.adopt(sequence, sequence.room)
        lease = adopted or self._lease(sequence)
        if lease is None:
            return False
        sequence.table = SlotTable.of(lease.blocks, parts.cache.block_size)
        if is_resumed:
            sequence.todo = list(range(lease.exact_tokens, len(sequence.tokens)))
            return True
        waited = parts.loading.ended(sequence, began)
        planned = matched = time.monotonic()
        if adopted:
            sequence.plan, sequence.todo = parts.preassembly.complete(sequence)
        else:
            matched = self._plan(sequence, sequence.table, lease)
        sequence.parts = {
            "queue": began - sequence.arrival - waited,
            "match": matched - planned,
            "assemble": time.monotonic() - matched,
            "other": planned - began,
        }
        if sequence.load_asked is not None:
            sequence.parts["load"] = waited
        return True

    def _plan(self, sequence: RequestSequence, table: SlotTable, lease: Lease) -> float:
        """Plan and write the translated spans. Returns the time at which planning ended."""
        parts, began = self._parts, time.monotonic()
        taken, plan = parts.shared.tokens, parts.runtime.plan(sequence.request, lease.spans)
        matched = time.monotonic()
        if parts.assembler.works_ahead:
            left = parts.shared.take(sequence, plan)  # it may change the table
            assert sequence.table is not None
            parts.assembler.assemble(sequence.request, sequence.table, left)
            sequence.plan, sequence.written = plan, plan.translations
        else:  # it writes something else than translations
            sequence.plan = parts.assembler.assemble(sequence.request, table, plan)
        sequence.todo = sequence.plan.computed
        if sequence.plan.sentinels:
            assert sequence.table is not None
            sequence.sentinels = [parts.sentinels.read(sequence.table, sequence.plan.sentinels)]
        if plan.translations and parts.shared.tokens == taken:  # else it would seem cheaper than it is
            seconds = time.monotonic() - began
            parts.costs.observe_translation(len(plan.translations), plan.translated_tokens, seconds)
        return matched

    def _lease(self, sequence: RequestSequence) -> Lease | None:
        """Lease blocks to a request, evicting speculatively prepared prompts first, then prompts kept for learning,
        then base prefills, then another tenant's requests. Returns None if there is no room now.
        """
        while (lease := self._try_lease(sequence, sequence.room)) is None:
            if not (self._reclaim_spare() or self._parts.learning.reclaim_job() or self._requests.preempt(sequence)):
                return None
        return lease

    def _reclaim_spare(self) -> bool:
        """Free blocks of work that no request waits for. Returns False if there is none."""
        return self._parts.preassembly.give_back() or self._parts.learning.reclaim()

    def _try_lease(self, sequence: Sequence, room: int) -> Lease | None:
        limit = self._parts.snapshots.limit(sequence)
        try:
            lease = self._parts.cache.admit(sequence.key, sequence.namespace, sequence.tokens, limit, room)
        except OutOfBlocks:
            return None
        self._parts.snapshots.begin(sequence, lease.exact_tokens)
        return lease
